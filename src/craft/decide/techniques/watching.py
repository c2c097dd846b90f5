"""Techniques that watch running workers: hangs, divergence, stragglers, GPU health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec

from craft.decide.detect.gpu_health import HealthSettings
from craft.decide.detect.hangs import HangLimits
from craft.decide.detect.spikes import DivergenceAnswer, SpikeRule
from craft.decide.detect.stragglers import StragglerSettings
from craft.decide.policies.detected import HangPolicy, HealthPolicy, StragglerPolicy
from craft.decide.policies.policy import Policy
from craft.decide.techniques.technique import Technique
from craft.protocol.events import (
    ConditionSeen,
    NumbersDiverged,
    RolledBack,
    StragglerFound,
    StragglerGone,
    WorkerOverdue,
)
from craft.protocol.values.config import says


class Hang(Technique[HangLimits]):
    name = "hang"
    summary = "finds workers that hang or are stopped, by what each of them usually takes, and frees the others"
    Settings = HangLimits
    flags: ClassVar[Mapping[str, str]] = {
        "hang_limit_s": "limit_s",
        "hang_factor": "factor",
        "first_step_limit_s": "first_step_limit_s",
        "update_limit_s": "update_limit_s",
        "stop_limit_s": "stop_limit_s",
    }
    emits = (WorkerOverdue,)
    answers = (WorkerOverdue,)

    def policies(self) -> Sequence[Policy]:
        return (HangPolicy(),)


class DivergenceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    answer: Annotated[
        DivergenceAnswer,
        says(
            "report; skip: the step changes nothing; lower-lr; rollback: to the newest checkpoint, without the data since; stop."
        ),
    ] = "report"
    spike_deviations: Annotated[
        Annotated[float, msgspec.Meta(gt=0.0)] | None,
        says("A finite number counts, too, if it is so many robust deviations above the median of the window."),
    ] = None
    spike_ratio: Annotated[
        Annotated[float, msgspec.Meta(gt=1.0)] | None,
        says("The same, if it is so many times the median of the window."),
    ] = None
    spike_metric: Annotated[str, says("Which number that the script logs is looked at for spikes.")] = "loss"
    spike_window: Annotated[
        int, msgspec.Meta(ge=3, le=10_000), says("How many steps before are looked at; until then there are no spikes.")
    ] = 50

    @property
    def spikes(self) -> SpikeRule | None:
        """When a finite number is a spike; None: never."""
        if self.spike_deviations is None and self.spike_ratio is None:
            return None
        return SpikeRule(
            metric=self.spike_metric, window=self.spike_window, deviations=self.spike_deviations, ratio=self.spike_ratio
        )


class Divergence(Technique[DivergenceSettings]):
    """Its hooks are ``worker/monitor/nonfinite``: every worker sees the same numbers and finds the same."""

    name = "divergence"
    summary = "looks at every loss and gradient, and answers one that is not finite, or a spike where that is asked for"
    Settings = DivergenceSettings
    flags: ClassVar[Mapping[str, str]] = {"on_divergence": "answer"}
    points = ("after_commit",)
    shared = ("answer", "spike_deviations", "spike_ratio", "spike_metric", "spike_window")
    emits = (NumbersDiverged, RolledBack)


class Stragglers(Technique[StragglerSettings]):
    """Its hooks are ``worker/monitor/stragglers``: every worker has the same times, from the control word."""

    name = "stragglers"
    summary = "finds workers that are slower than the others, and moves microbatches away from them"
    Settings = StragglerSettings
    flags: ClassVar[Mapping[str, str]] = {"on_straggler": "answer", "straggler_factor": "factor"}
    points = ("after_commit",)
    shared = ("answer", "factor", "patience", "min_lost_ms")
    emits = (StragglerFound, StragglerGone)
    answers = (StragglerFound,)

    def policies(self) -> Sequence[Policy]:
        return (StragglerPolicy(),)


class GpuHealth(Technique[HealthSettings]):
    """Its hooks are ``worker/monitor/gpu``: every worker watches the GPU that it uses."""

    name = "gpu_health"
    summary = "watches each worker's GPU for ECC errors, XIDs, heat and falling off the bus"
    Settings = HealthSettings
    emits = (ConditionSeen,)
    answers = (ConditionSeen,)

    def policies(self) -> Sequence[Policy]:
        return (HealthPolicy(self.name, self.settings),)
