"""Remember which alerts were taken in already, those that the journal tells of included."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from craft.protocol.events import AlertFired, AlertResolved

_KEPT = 10_000

Key = tuple[str, str, str, bool]
News = AlertFired | AlertResolved


class AlertBook:
    """Which notices were taken in already, those that the journal tells of included."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self._taken: OrderedDict[Key, str] = OrderedDict()
        for line in lines:
            if line.get("event") in ("AlertFired", "AlertResolved"):
                self.take(msgspec.convert(line, News))

    def has(self, event: News) -> bool:
        key, standing = _entry(event)
        return self._taken.get(key) == standing

    def take(self, event: News) -> bool:
        """Note an event; False if it was there already."""
        if self.has(event):
            return False
        key, standing = _entry(event)
        self._taken[key] = standing
        self._taken.move_to_end(key)
        if len(self._taken) > _KEPT:
            self._taken.popitem(last=False)
        return True


def _entry(event: News) -> tuple[Key, str]:
    """Under what an event is noted, and as what: where nothing tells one time from the next, a change is news."""
    resolved = isinstance(event, AlertResolved)
    if event.starts_at:
        return (event.source, event.fingerprint, event.starts_at, resolved), ""
    return (event.source, event.fingerprint, "", False), "" if resolved else event.labels.get("value", "firing")
