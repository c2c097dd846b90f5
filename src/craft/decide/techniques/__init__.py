"""The built-in techniques, in the order in which their policies are asked."""

from __future__ import annotations

from craft.decide.techniques.alerts import Alerts
from craft.decide.techniques.lasting import Checkpoints, CheckpointSettings, Preemption, PreemptionSettings
from craft.decide.techniques.losses import (
    Loss,
    LossSettings,
    Restart,
    RestartSettings,
    RestoreFromCheckpoint,
    Spares,
    SpareSettings,
    max_restarts_of,
    spares_of,
)
from craft.decide.techniques.membership import Joining, Membership, Retry
from craft.decide.techniques.technique import AnyTechnique, Chosen
from craft.decide.techniques.watching import Divergence, DivergenceSettings, GpuHealth, Hang, Stragglers

__all__ = [
    "BUILT_IN",
    "Alerts",
    "CheckpointSettings",
    "Checkpoints",
    "Divergence",
    "DivergenceSettings",
    "GpuHealth",
    "Hang",
    "Joining",
    "Loss",
    "LossSettings",
    "Membership",
    "Preemption",
    "PreemptionSettings",
    "Restart",
    "RestartSettings",
    "RestoreFromCheckpoint",
    "Retry",
    "SpareSettings",
    "Spares",
    "Stragglers",
    "defaults",
    "max_restarts_of",
    "spares_of",
]

BUILT_IN: tuple[type[AnyTechnique], ...] = (
    Preemption,
    Membership,
    RestoreFromCheckpoint,
    Loss,
    Spares,
    Restart,
    Hang,
    Retry,
    Joining,
    Divergence,
    Stragglers,
    GpuHealth,
    Checkpoints,
    Alerts,
)


def defaults(*given: AnyTechnique) -> Chosen:
    """Return all built-in techniques with default settings; ``given`` replaces those of the same name."""
    by_name = {each.name: each for each in given}
    return Chosen([by_name.get(kind.name) or kind(kind.Settings()) for kind in BUILT_IN])
