"""For tests of jobs: place a fault at a named point of a step, and check what a run left behind (``craft.testing.history``)."""

from __future__ import annotations

from craft.protocol.errors import InjectedError
from craft.testing.faults import Fault, arm
from craft.worker.points import reach

__all__ = ["Fault", "InjectedError", "arm", "reach"]
