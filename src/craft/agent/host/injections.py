"""Inject faults that concern this agent: signals to its workers, and to itself.

Enters: the injections of a directive, which repeats them. Each that concerns this agent is carried out once.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable

from craft.protocol.events import FaultInjected

logger = logging.getLogger(__name__)

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class AgentInjections:
    """Lives on the agent's event loop."""

    def __init__(self, host: str, send_signal: Callable[[str, signal.Signals], None]) -> None:
        self._host = host
        self._send_signal = send_signal
        self._done: frozenset[str] = frozenset()

    def take(self, injections: Iterable[FaultInjected]) -> None:
        """Carry out what is new."""
        new = [each for each in injections if each.injection_id not in self._done]
        # What is not in the directive any more does not come back: the set stays small.
        self._done = frozenset(each.injection_id for each in injections)
        for each in new:
            if each.fault in _SIGNALS and each.worker_id is not None:
                self._send_signal(each.worker_id, _SIGNALS[each.fault])
            elif each.fault == "kill-agent" and (each.host, each.agent_pid) == (self._host, os.getpid()):
                logger.warning("killed by an injected fault")
                os.kill(os.getpid(), signal.SIGKILL)
