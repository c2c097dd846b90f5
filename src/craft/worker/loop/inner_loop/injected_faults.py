"""Faults that ``craft chaos`` injects into this worker.

``take`` receives directives on the channel's thread. ``strike`` causes the faults on the main thread, where ``steps`` or
``attempts`` hands a microbatch to the script; only a cut connection is cut at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from time import monotonic

from craft.protocol.errors import InjectedError
from craft.protocol.events import FaultInjected
from craft.protocol.messages import Directive

logger = logging.getLogger(__name__)


class InjectedFaults:
    """Queues faults from the channel's thread for the main thread."""

    def __init__(self, worker_id: str, cut: Callable[[], bool]) -> None:
        """``cut()`` cuts one connection of the current group."""
        self._worker_id = worker_id
        self._cut = cut
        self._done: frozenset[str] = frozenset()
        # Guards the next two.
        self._lock = threading.Lock()
        self._pending: list[FaultInjected] = []
        self._slow: tuple[float, float] | None = None
        """(end time, delay added to each microbatch, in s)."""

    def take(self, directive: Directive) -> None:
        """Queue the faults that are new for this worker; a directive repeats earlier ones."""
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
        """Cause the faults that are due, on the main thread, before the script computes a microbatch."""
        if not self._pending and self._slow is None:
            return
        with self._lock:
            due, self._pending = self._pending, []
        for each in due:
            logger.warning("an injected fault: %s in step %d", each.fault, step)
            if each.fault == "slow":
                self._slow = (monotonic() + each.seconds, each.delay_ms / 1e3)
            elif each.fault == "raise":
                raise InjectedError(f"an error was injected into step {step}")
            else:
                threading.Event().wait()
        if self._slow is not None:
            until, delay_s = self._slow
            if monotonic() < until:
                time.sleep(delay_s)
            else:
                self._slow = None


_injections: InjectedFaults | None = None


def install(injections: InjectedFaults) -> None:
    """Make this module's ``strike`` use ``injections``; one per process."""
    global _injections
    _injections = injections


def strike(step: int) -> None:
    """Cause the faults that are due, before a microbatch of ``step``."""
    if _injections is not None:
        _injections.strike(step)
