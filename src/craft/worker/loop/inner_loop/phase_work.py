"""The microbatches of one reduction in the body of ``job.attempts``, as its inner loop computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from craft.protocol.control_word import MicrobatchRecord
from craft.protocol.errors import GroupAborted
from craft.worker.data.skipping import SkippingSource
from craft.worker.loop.inner_loop.microbatch import ScriptNotes
from craft.worker.membership.participant import Participant
from craft.worker.monitor.consistency import sample_of
from craft.worker.monitor.consistency_errors import check_sample
from craft.worker.monitor.repeated_microbatch import PROBE, is_extra, place_of
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.user_reduce import ReducePhase


def safe_point(participant: Participant) -> None:
    """Raise GroupAborted if there is a newer generation: the body of the attempt ends here."""
    if participant.moved:
        generation = participant.ledger.generation
        raise GroupAborted(f"generation {generation} is over: the step is tried again", generation)


class _Work:
    """What both kinds of ``MicrobatchWork`` of a phase share. Owned by the main thread."""

    def __init__(
        self, step: int, due: Iterable[int], phase: ReducePhase, buffers: ModuleBuffers, source: SkippingSource
    ) -> None:
        self._step = step
        self._due = iter(due)
        self._phase = phase
        self._buffers = buffers
        self._source = source

    def fetch(self, microbatch: int) -> Any:
        fetch = self._source.again if is_extra(microbatch) else self._source.fetch
        return fetch(self._step, place_of(microbatch))

    def start(self, microbatch: int, weight: float) -> None:
        size = 1 if is_extra(microbatch) else self._source.size_of(self._step)
        self._phase.gradients.start(place_of(microbatch), size, None)
        self._buffers.restore()
        self._phase.gradients.weigh(weight)

    def hold_empty(self, microbatch: int) -> NoReturn:
        raise AssertionError(f"microbatch {microbatch} has no data: job.attempts takes no streams that end")


class PhaseWork(_Work):
    """This worker's share of a reduction."""

    def __init__(
        self,
        step: int,
        participant: Participant,
        phase: ReducePhase,
        buffers: ModuleBuffers,
        source: SkippingSource,
        scalars: dict[int, dict[str, float]],
        samples: bool,
    ) -> None:
        """``scalars`` takes what the script logs. ``samples``: whether joiners compare the bits of microbatch 0."""
        super().__init__(step, participant.ledger.share, phase, buffers, source)
        self.records: list[MicrobatchRecord] = []
        self.sample = b""
        """Hash of a part of microbatch 0's gradient, if it was computed here and a joiner compares it."""
        self._participant = participant
        self._scalars = scalars
        self._samples = samples and bool(participant.ledger.idle)

    def next_microbatch(self) -> int | None:
        safe_point(self._participant)
        return next(self._due, None)

    def hold(self, microbatch: int, notes: ScriptNotes) -> bool:
        leaf = self._phase.gradients.finish(sample_of if microbatch == 0 and self._samples else None)
        if microbatch == 0:
            self._buffers.keep_first()
            self.sample = leaf.digest
        logged = {name: float(value) for name, value in notes.scalars.items()}
        self._scalars.setdefault(microbatch, {}).update(logged)
        self.records.append(
            MicrobatchRecord(
                microbatch=microbatch,
                weight=leaf.weight,
                present=leaf.present,
                scalars=tuple(sorted(logged.items())),
            )
        )
        return True


class ComparedWork(_Work):
    """Microbatch 0, which a joiner computes, too, to compare its bits with the others'."""

    def __init__(
        self, step: int, phase: ReducePhase, buffers: ModuleBuffers, source: SkippingSource, sample: bytes
    ) -> None:
        super().__init__(step, (PROBE,), phase, buffers, source)
        self._sample = sample

    def next_microbatch(self) -> int | None:
        return next(self._due, None)

    def hold(self, microbatch: int, notes: ScriptNotes) -> bool:
        """Raise NewcomerDiffers if the others got other bits."""
        own = self._phase.gradients.discard(sample_of)
        self._buffers.restore()
        check_sample(own, self._sample, self._step)
        return False
