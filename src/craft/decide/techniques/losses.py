"""Techniques for the loss of workers: their microbatches, slots, processes and state.

With ``Retry`` they escalate, one after the other; the reason of each action says why.

1. **retry**: an exchange broke without a loss: the same members re-form the group, a few times (``Retry``).
2. **replace**: a member died or is unreachable: the others go on, and a spare or a new worker takes its slot
   (``Retry``, ``Loss``, ``Spares``, ``Restart``).
3. **restore**: no copy of the state is left: all restore from the newest checkpoint (``RestoreFromCheckpoint``).
4. **stop**: no checkpoint, no workers, or no progress: exit code 3 (``RestoreFromCheckpoint``, ``Loss``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from craft.decide.job.loss_costs import CostSettings
from craft.decide.job.restoration import RestoreSettings
from craft.decide.policies.loss import LossPolicy
from craft.decide.policies.policy import Policy
from craft.decide.policies.restore import RestorePolicy
from craft.decide.step.settle import LossAnswer
from craft.decide.techniques.technique import Technique
from craft.protocol.events import (
    ArrivalsEnded,
    HoldExpired,
    HostLost,
    ReplacementsEnded,
    ReplacementsResumed,
    StateGone,
    WorkerEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from craft.protocol.values.config import says


class LossSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    answer: Annotated[
        LossAnswer,
        says(
            "What becomes of its microbatches: redo (exact), shrink (dropped), or wait for who takes its place; auto: redo,"
            " and its slot is filled only if that costs less than it saves."
        ),
    ] = "redo"
    wait_limit_s: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e9),
        says("How long that is waited for: with wait, or when fewer than --min-workers are left."),
    ] = 60.0
    spare_s: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e9),
        says("With auto, until it was measured: from a loss to the first commit of a spare in the lost slot."),
    ] = 1.0
    restart_s: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e9),
        says("With auto, until it was measured: from a loss to the first commit of a worker started because of it."),
    ] = 10.0
    join_steps: Annotated[
        float, msgspec.Meta(ge=0.0, le=1e9), says("With auto: what a join costs the others, in steps.")
    ] = 1.0


class Loss(Technique[LossSettings]):
    name = "loss"
    summary = "goes on with the survivors when a worker is lost"
    Settings = LossSettings
    flags: ClassVar[Mapping[str, str]] = {"on_loss": "answer", "wait_limit_s": "wait_limit_s"}
    shared = ("answer",)
    optional = False
    before = ()
    emits = (WorkerLost, HostLost)
    answers = (
        WorkerLost, HostLost, WorkerFailed, WorkerFinished, WorkerLeft, WorkerJoined, HoldExpired, ReplacementsEnded,
        StateGone,
    )  # fmt: skip

    def objection(self, others: Mapping[str, Technique[Any]]) -> str | None:
        if self.settings.answer != "wait" or spares_of(others) or max_restarts_of(others):
            return None
        return "with wait, a replacement must be able to come: give --spares, or let restart be on"

    def inexact(self) -> str | None:
        return "microbatches of lost workers are dropped" if self.settings.answer == "shrink" else None

    def policies(self) -> Sequence[Policy]:
        costs = CostSettings(
            spare_s=self.settings.spare_s, restart_s=self.settings.restart_s, join_steps=self.settings.join_steps
        )
        return (LossPolicy(self.settings.answer, self.settings.wait_limit_s, costs),)


class RestoreFromCheckpoint(Technique[RestoreSettings]):
    """Restores the job once every copy of the state is lost. Asked before ``Loss``, which would give the job up."""

    name = "restore"
    summary = "restores the newest checkpoint, automatically, when no worker with the training state is left"
    Settings = RestoreSettings
    before = ("loss",)
    answers = (
        WorkerLost, HostLost, WorkerFailed, WorkerFinished, WorkerLeft, WorkerEnded, WorkerJoined, StateGone, HoldExpired,
        ArrivalsEnded, ReplacementsEnded,
    )  # fmt: skip

    def policies(self) -> Sequence[Policy]:
        return (RestorePolicy(self.settings),)


class SpareSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Annotated[
        int,
        msgspec.Meta(ge=0),
        says("Further workers of each host, which wait at their first step until a slot is free."),
    ] = 0


class Spares(Technique[SpareSettings]):
    name = "spares"
    summary = "keeps workers ready that take the slot of a lost one at once"
    Settings = SpareSettings
    flags: ClassVar[Mapping[str, str]] = {"spares": "count"}
    emits = (WorkerJoined,)


class RestartSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    most: Annotated[
        int, msgspec.Meta(ge=0), says("Workers that are started on each host in the place of lost ones, at most.")
    ] = 1000


class Restart(Technique[RestartSettings]):
    name = "restart"
    summary = "starts a worker in the place of a lost one; it joins at a step boundary, with its state from live peers"
    Settings = RestartSettings
    flags: ClassVar[Mapping[str, str]] = {"max_restarts": "most"}
    emits = (WorkerJoined, ReplacementsEnded, ReplacementsResumed)


def spares_of(techniques: Mapping[str, Technique[Any]]) -> int:
    """Return the number of spares of a host; 0 if the technique is off."""
    found = techniques.get(Spares.name)
    return found.settings.count if isinstance(found, Spares) else 0


def max_restarts_of(techniques: Mapping[str, Technique[Any]]) -> int:
    found = techniques.get(Restart.name)
    return found.settings.most if isinstance(found, Restart) else 0
