"""Techniques of membership: the first generation, joins and drains, the end of the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from craft.decide.policies.broken import BrokenPolicy
from craft.decide.policies.finish import FinishPolicy
from craft.decide.policies.last_copy import LastCopyPolicy
from craft.decide.policies.membership import FormPolicy, JoinPolicy, RecoverPolicy
from craft.decide.policies.policy import Policy
from craft.decide.policies.requests import AbortPolicy, DrainPolicy
from craft.decide.policies.stop import StopPolicy
from craft.decide.techniques.technique import NoSettings, Technique
from craft.protocol.events import (
    AbortRequested,
    Answered,
    AwaitExpired,
    DrainExpired,
    DrainRequested,
    ExchangeBroken,
    GenerationEntered,
    GenerationStuck,
    HoldExpired,
    HostLost,
    HostSilent,
    LoopBegun,
    LoopEnded,
    ReplacementsEnded,
    ScriptEnded,
    StateDiverged,
    StateGone,
    StopRequested,
    WorkerCaughtUp,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)


class Membership(Technique[NoSettings]):
    """Asked first, after preemption: a job that ends needs no other answer."""

    name = "membership"
    summary = "makes the first generation, and ends the job when all is done or nothing can be"
    optional = False
    before = ()
    emits = (
        WorkerJoined, WorkerFinished, WorkerFailed, GenerationEntered, StateDiverged, StateGone, LoopBegun, LoopEnded,
        ScriptEnded, WorkerCaughtUp, HostSilent, Answered, AwaitExpired,
    )  # fmt: skip
    answers = (
        StopRequested, StateDiverged, WorkerFailed, WorkerFinished, WorkerLeft, WorkerJoined, WorkerLost, HostLost,
        LoopEnded, ScriptEnded, GenerationEntered, HoldExpired, ReplacementsEnded, WorkerCaughtUp, HostSilent,
        AwaitExpired,
    )  # fmt: skip

    def policies(self) -> Sequence[Policy]:
        return (StopPolicy(), FinishPolicy(), FormPolicy(), LastCopyPolicy())


class Retry(Technique[NoSettings]):
    """The first level of the escalation: no worker is lost, so all try again."""

    name = "retry"
    summary = (
        "re-forms the group with the same members when an exchange breaks without a loss; then drops unreachable ones"
    )
    optional = False
    before: ClassVar[tuple[str, ...]] = ("joining",)
    emits = (ExchangeBroken,)
    answers = (ExchangeBroken, GenerationStuck, AbortRequested)

    def policies(self) -> Sequence[Policy]:
        return (BrokenPolicy(), AbortPolicy())


class Joining(Technique[NoSettings]):
    name = "joining"
    summary = (
        "lets workers come and go at step boundaries, and adopts a running job when the lighthouse was started again"
    )
    optional = False
    before = ()
    emits = (WorkerLeft,)
    answers = (
        GenerationEntered, DrainRequested, DrainExpired, WorkerJoined, WorkerLeft, ReplacementsEnded, WorkerCaughtUp, WorkerLost,
    )  # fmt: skip

    def policies(self) -> Sequence[Policy]:
        return (RecoverPolicy(), DrainPolicy(), JoinPolicy())
