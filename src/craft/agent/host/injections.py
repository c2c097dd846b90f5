"""Inject faults into this host: send signals to its workers or to the agent itself.

Directives repeat their injections; each one is carried out once.
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
    """Carries out each injection of a directive once. Lives on the agent's event loop."""

    def __init__(self, host: str, send_signal: Callable[[str, signal.Signals], None]) -> None:
        self._host = host
        self._send_signal = send_signal
        self._done: frozenset[str] = frozenset()

    def take(self, injections: Iterable[FaultInjected]) -> None:
        """Carry out the injections that are new."""
        new = [each for each in injections if each.injection_id not in self._done]
        # An injection that left the directive never comes back, so the set stays small.
        self._done = frozenset(each.injection_id for each in injections)
        for each in new:
            if each.fault in _SIGNALS and each.worker_id is not None:
                self._send_signal(each.worker_id, _SIGNALS[each.fault])
            elif each.fault == "kill-agent" and (each.host, each.agent_pid) == (self._host, os.getpid()):
                logger.warning("killed by an injected fault")
                os.kill(os.getpid(), signal.SIGKILL)
