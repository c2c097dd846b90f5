"""Turn notices of other systems into events, each once; policies answer them.

Enters: notices, from ``control/http/alert_formats``. Leaves: the HTTP answer, with the events and the actions that
followed. All are checked before the first is handled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from craft.control.agents.token_bucket import TokenBucket
from craft.control.core.loop import Loop
from craft.control.http.middleware import answer, refusal
from craft.control.replay.alert_book import AlertBook, News
from craft.decide.job.alerts import AlertSettings, event_of
from craft.protocol.actions import AnyAction
from craft.protocol.values.alerts import Notice

EVENTS_PER_S = 50.0
BURST = 1000.0
"""Most new alerts at once, a full group of Alertmanager's: each is a line of the journal."""


class AlertIntake:
    """Handles notices, on the lighthouse's thread."""

    def __init__(
        self,
        loop: Loop,
        book: AlertBook,
        settings: AlertSettings,
        *,
        preempts: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``preempts``: whether an active technique answers preemption."""
        self.settings = settings
        self._loop = loop
        self._book = book
        self._preempts = preempts
        self._now = now
        self._bucket = TokenBucket(EVENTS_PER_S, BURST, now())

    def take(self, notices: Sequence[Notice]) -> web.Response:
        """Handle what is new, and return what came of each."""
        state, saves = self._loop.state, self._loop.report_events.checkpoints
        events = [
            event_of(each, self.settings, state, saves=saves, preempts=self._preempts, now=time.time())
            for each in notices
        ]
        new = sum(not self._book.has(event) for event in events)
        pause_s = self._bucket.pause_s(new, self._now())
        if pause_s:
            response = refusal(429, f"too many new alerts: at most {EVENTS_PER_S:g} a second, {BURST:g} at once")
            response.headers["Retry-After"] = str(math.ceil(pause_s))
            return response
        self._bucket.take(new, self._now())
        outcomes = [self._outcome(event) for event in events]
        return answer({"outcomes": outcomes, "already": all(each["already"] for each in outcomes)})

    def _outcome(self, event: News) -> dict[str, Any]:
        if not self._book.take(event):
            return {"event": event, "actions": (), "already": True}
        actions: tuple[AnyAction, ...] = self._loop.handle(event)
        return {"event": event, "actions": actions, "already": False}
