"""Remember which alerts were handled, those in the journal included."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from craft.protocol.events import AlertFired, AlertResolved

_KEPT = 10_000

Key = tuple[str, str, str, bool]
News = AlertFired | AlertResolved


class AlertBook:
    """The alerts that were handled. Fed by the journal at start, then by ``control/http/alerts``."""

    def __init__(self) -> None:
        self._taken: OrderedDict[Key, str] = OrderedDict()

    def __call__(self, line: dict[str, Any]) -> None:
        """Take in a line of the journal."""
        if line.get("event") in ("AlertFired", "AlertResolved"):
            self.take(msgspec.convert(line, News))

    def has(self, event: News) -> bool:
        key, standing = _entry(event)
        return self._taken.get(key) == standing

    def take(self, event: News) -> bool:
        """Record an event; return False if it was recorded before."""
        if self.has(event):
            return False
        key, standing = _entry(event)
        self._taken[key] = standing
        self._taken.move_to_end(key)
        if len(self._taken) > _KEPT:
            self._taken.popitem(last=False)
        return True


def _entry(event: News) -> tuple[Key, str]:
    """Return the key and the value of an event; without a start time, only a changed value is new."""
    resolved = isinstance(event, AlertResolved)
    if event.starts_at:
        return (event.source, event.fingerprint, event.starts_at, resolved), ""
    return (event.source, event.fingerprint, "", False), "" if resolved else event.labels.get("value", "firing")
