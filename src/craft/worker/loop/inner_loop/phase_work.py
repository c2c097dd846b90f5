"""The microbatches of one reduction in the body of ``job.attempts``, as its inner loop computes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from craft.protocol.control_word import MicrobatchRecord
from craft.protocol.errors import GroupAborted
from craft.worker.data.skipping import SkippingSource
from craft.worker.loop.inner_loop.microbatch import ScriptNotes
from craft.worker.membership.participant import Participant
from craft.worker.monitor.consistency import sample_of
from craft.worker.monitor.consistency_errors import check_sample
from craft.worker.monitor.repeated_microbatch import is_extra, place_of
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.user_reduce import ReducePhase


def safe_point(participant: Participant) -> None:
    """Raise GroupAborted if there is a newer generation: the body of the attempt ends here."""
    if participant.moved:
        generation = participant.ledger.generation
        raise GroupAborted(f"generation {generation} is over: the step is tried again", generation)


@dataclass(eq=False)
class _Work:
    """What both kinds of ``MicrobatchWork`` of a phase share. Owned by the main thread."""

    step: int
    due: Iterator[int]
    phase: ReducePhase
    buffers: ModuleBuffers
    source: SkippingSource

    def fetch(self, microbatch: int) -> Any:
        fetch = self.source.again if is_extra(microbatch) else self.source.fetch
        return fetch(self.step, place_of(microbatch))

    def start(self, microbatch: int, weight: float) -> None:
        size = 1 if is_extra(microbatch) else self.source.size_of(self.step)
        self.phase.gradients.start(place_of(microbatch), size, None)
        self.buffers.restore()
        self.phase.gradients.weigh(weight)

    def hold_empty(self, microbatch: int) -> NoReturn:
        raise AssertionError(f"microbatch {microbatch} has no data: job.attempts takes no streams that end")


@dataclass(eq=False)
class PhaseWork(_Work):
    """This worker's share of a reduction."""

    participant: Participant
    scalars: dict[int, dict[str, float]]
    """Takes what the script logs, by microbatch."""
    samples: bool
    """Whether joiners compare the bits of microbatch 0."""
    sample: bytes = b""
    """Hash of a part of microbatch 0's gradient, if it was computed here and a joiner compares it."""
    records: list[MicrobatchRecord] = field(default_factory=list)

    def next_microbatch(self) -> int | None:
        safe_point(self.participant)
        return next(self.due, None)

    def hold(self, microbatch: int, notes: ScriptNotes) -> bool:
        leaf = self.phase.gradients.finish(sample_of if microbatch == 0 and self.samples else None)
        if microbatch == 0:
            self.buffers.keep_first()
            self.sample = leaf.digest
        logged = {name: float(value) for name, value in notes.scalars.items()}
        self.scalars.setdefault(microbatch, {}).update(logged)
        scalars = tuple(sorted(logged.items()))
        self.records.append(
            MicrobatchRecord(microbatch=microbatch, weight=leaf.weight, present=leaf.present, scalars=scalars)
        )
        return True


@dataclass(eq=False)
class ComparedWork(_Work):
    """Microbatch 0, which a joiner computes, too, to compare its bits with the others'."""

    sample: bytes

    def next_microbatch(self) -> int | None:
        return next(self.due, None)

    def hold(self, microbatch: int, notes: ScriptNotes) -> bool:
        """Raise NewcomerDiffers if the others got other bits."""
        own = self.phase.gradients.discard(sample_of)
        self.buffers.restore()
        check_sample(own, self.sample, self.step)
        return False
