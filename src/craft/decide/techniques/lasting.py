"""Techniques that make the job's state durable: checkpoints and preemption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec

from craft.decide.policies.policy import Policy
from craft.decide.policies.preempt import PreemptPolicy
from craft.decide.policies.requests import CheckpointPolicy
from craft.decide.step.interval import parse_every
from craft.decide.techniques.technique import Technique
from craft.protocol.errors import ConfigError
from craft.protocol.events import (
    CheckpointAbandoned,
    CheckpointRequested,
    CheckpointRestored,
    CheckpointSkipped,
    CheckpointWritten,
    HostLost,
    IntervalChosen,
    PreemptExpired,
    PreemptRequested,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from craft.protocol.values.config import says


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: Annotated[
        str | None,
        says("Where they go: a path, or a URL that fsspec knows, such as s3://bucket/job; or the script says."),
    ] = None
    local: Annotated[str | None, says("A fast directory of each host, to which they are written first.")] = None
    every: Annotated[
        str | None,
        says("auto, or such as '500 steps', '1 epoch' or '10 min'; by default what the script says, or else auto."),
    ] = None
    keep: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        says("How many are kept, besides those with a tag; by default what the script says, or else 3."),
    ] = None


class Checkpoints(Technique[CheckpointSettings]):
    """Its hooks are ``worker/checkpoint/scheduler``: by the control word, all workers save at the same step boundary."""

    name = "checkpoints"
    summary = "writes the state of the job, in the background, to where a job can go on from it"
    Settings = CheckpointSettings
    flags: ClassVar[Mapping[str, str]] = {
        "checkpoints": "url",
        "checkpoint_local": "local",
        "checkpoint_every": "every",
        "checkpoint_keep": "keep",
    }
    points = ("after_commit", "generation_change")
    emits = (CheckpointWritten, CheckpointSkipped, CheckpointAbandoned, CheckpointRestored, IntervalChosen)
    answers = (CheckpointRequested,)

    @classmethod
    def check(cls, settings: CheckpointSettings) -> None:
        if settings.url == "":
            raise ConfigError("url='': say where they go: a path, or such as s3://bucket/job")
        if settings.every is not None:
            parse_every(settings.every)

    def policies(self) -> Sequence[Policy]:
        return (CheckpointPolicy(),)


class PreemptionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    file: Annotated[
        str | None, says("When this file appears, the job takes a checkpoint and ends with exit code 75.")
    ] = None
    limit_s: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e9),
        says("After SIGTERM, workers have this long to leave at a step boundary, after one more checkpoint."),
    ] = 30.0


class Preemption(Technique[PreemptionSettings]):
    name = "preemption"
    summary = "makes a preempted job take a checkpoint and leave, to be resumed"
    Settings = PreemptionSettings
    flags: ClassVar[Mapping[str, str]] = {"preempt_file": "file", "drain_limit_s": "limit_s"}
    before = ("membership",)
    emits = (PreemptRequested,)
    answers = (
        PreemptRequested, PreemptExpired, WorkerJoined, WorkerLeft, WorkerFinished, WorkerLost, WorkerFailed, HostLost,
    )  # fmt: skip

    def policies(self) -> Sequence[Policy]:
        return (PreemptPolicy(),)
