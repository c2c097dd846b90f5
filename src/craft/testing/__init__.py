"""Tools for tests of jobs: inject a fault at a named point of a step, and check a run's files (``craft.testing.history``)."""

from __future__ import annotations

from craft.protocol.errors import InjectedError
from craft.telemetry.fault_points import reach
from craft.testing.faults import PlacedFault as Fault
from craft.testing.faults import arm

__all__ = ["Fault", "InjectedError", "arm", "reach"]
