"""Faults that this worker is told to cause in itself: ``craft chaos``.

Enters: directives, on the channel's thread (``take``). What happens, happens on the main thread, at the one point in
``steps`` where a microbatch is handed to the script (``strike``); only a connection is cut at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from craft.protocol.errors import InjectedError
from craft.protocol.events import FaultInjected
from craft.protocol.messages import Directive

logger = logging.getLogger(__name__)


class InjectedFaults:
    """The channel's thread puts faults in, the main thread takes them out."""

    def __init__(self, worker_id: str, cut: Callable[[], bool]) -> None:
        """``cut()`` cuts one connection of the current group."""
        self._worker_id = worker_id
        self._cut = cut
        self._done: frozenset[str] = frozenset()
        # Guards the next two.
        self._lock = threading.Lock()
        self._pending: list[FaultInjected] = []
        self._slow: tuple[float, float] | None = None
        """(until when, how much longer a microbatch takes)."""

    def take(self, directive: Directive) -> None:
        """Note what is new for this worker; a directive repeats what it said before."""
        if not directive.injections and not self._done:
            return
        new = [each for each in directive.injections if each.injection_id not in self._done]
        self._done = frozenset(each.injection_id for each in directive.injections)
        for each in new:
            if each.worker_id != self._worker_id:
                continue
            if each.fault == "cut":
                logger.warning("an injected fault: %s", "a connection is cut" if self._cut() else "nothing to cut")
            elif each.fault in ("hang", "slow", "raise"):
                with self._lock:
                    self._pending.append(each)

    def strike(self, step: int) -> None:
        """Do what is due. On the main thread, where the script is about to compute a microbatch."""
        if not self._pending and self._slow is None:
            return
        with self._lock:
            due, self._pending = self._pending, []
        for each in due:
            logger.warning("an injected fault: %s in step %d", each.fault, step)
            if each.fault == "slow":
                self._slow = (time.monotonic() + each.seconds, each.delay_ms / 1e3)
            elif each.fault == "raise":
                raise InjectedError(f"an error was injected into step {step}")
            else:
                threading.Event().wait()
        if self._slow is not None:
            until, delay_s = self._slow
            if time.monotonic() < until:
                time.sleep(delay_s)
            else:
                self._slow = None


_injections: InjectedFaults | None = None


def install(injections: InjectedFaults) -> None:
    """Have ``strike`` of this module do what ``injections`` has; one per process."""
    global _injections
    _injections = injections


def strike(step: int) -> None:
    """The script is about to compute a microbatch of ``step``."""
    if _injections is not None:
        _injections.strike(step)
