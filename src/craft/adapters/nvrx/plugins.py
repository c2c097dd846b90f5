"""Plug-ins of ``inprocess.Wrapper``: ``AbortGloo`` frees blocked threads, ``TellHealth`` reports health checks as events."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.health_check import HealthCheck
from nvidia_resiliency_ext.inprocess.state import FrozenState

from craft.groups import sockets

logger = logging.getLogger(__name__)


class AbortGloo(Abort):
    """Shuts down the connections of this process's Gloo groups; waiting calls get a RuntimeError at once.

    The wrapper raises an exception in the main thread, which a thread inside Gloo never sees. Name it last in ``Compose``,
    which calls it first: ``AbortTorchDistributed``, which ends only NCCL's groups, forgets the others.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        number = sockets.abort_gloo()
        logger.info("rank %s: aborted %s Gloo connections", state.rank, number)
        return state


class TellHealth(HealthCheck):
    """Makes a check, and reports its result after a fault; errors of the check go on to the wrapper."""

    def __init__(self, check: HealthCheck, tell: Callable[[str, str], None], passed: Callable[[], None]) -> None:
        """``passed()`` is called after each passed check."""
        self._check = check
        self._tell = tell
        self._passed = passed

    def __call__(self, state: FrozenState) -> FrozenState:
        name = type(self._check).__name__
        try:
            found = self._check(state)
        except Exception as error:
            self._tell("health check failed", f"{name}: {type(error).__name__}: {error}")
            raise
        if state.fn_exception is not None:
            self._tell("health check passed", f"{name}, after {type(state.fn_exception).__name__}")
        self._passed()
        return found
