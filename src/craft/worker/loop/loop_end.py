"""The end of a training loop: all workers synchronize, and their ranks are fixed from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from craft.decide.step.settle import LOOP_END
from craft.protocol.values.activity import Phase
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.loop.pre_loop_calls import PreLoopCalls
from craft.worker.loop.trained_state import TrainedState
from craft.worker.state.loop_context import LoopContext

Call = Callable[[str, bytes], list[bytes] | None]


class AtEnd(msgspec.Struct, frozen=True, array_like=True):
    """One worker's message at the end of a loop."""

    worker_id: str
    generation: int
    """Generation under which its share of the last checkpoint was written; 0: no checkpoint is meant."""
    step: int
    """Committed steps."""


_decode = msgspec.msgpack.Decoder(AtEnd).decode


def after_loop(loop: int) -> str:
    """Return the name of the place for calls after the script's training loop ``loop``, from 1."""
    return f"end{loop}"


def meeting_at_end(loop: int) -> str:
    """Return the name of the place where all workers meet at the end of ``loop``, before the script continues."""
    return f"{after_loop(loop)}.meet"


class LoopEnd:
    """Synchronizes the workers at the end of a loop. Owned by the main thread."""

    def __init__(self, context: LoopContext, state: TrainedState, lifecycle: CheckpointLifecycle, call: Call) -> None:
        """``call`` gathers the bytes of all workers on all workers."""
        self._worker_id = context.settings.worker_id
        self._participant = context.participant
        self._membership = context.membership
        self._reporter = context.reporter
        self._activity = context.activity
        self._state = state
        self._lifecycle = lifecycle
        self._call = call
        self.company: tuple[str, ...] = ()
        """Workers that reached the end of the loop together, in rank order."""
        self.digest: str | None = None
        """Digest of the state at the end of the loop; None before it."""

    def meet(self) -> None:
        """Return when all workers are here and have written their shares of the last checkpoint."""
        self._activity.now(Phase.ENDING)
        parts = self._call(LOOP_END, self._own(0))
        while self._lifecycle.scheduler is not None:
            generation = self._participant.ledger.generation
            self._lifecycle.end()
            parts = self._call("steps: its last checkpoint", self._own(generation))
            assert parts is not None
            if len({_decode(part).generation for part in parts}) == 1:
                # All wrote their shares as members of one generation. Otherwise a worker was lost meanwhile.
                break
        assert parts is not None
        self.company = tuple(_decode(part).worker_id for part in parts)
        self.digest = self._state.digest()

    def finish(self, regroup: Callable[[], None]) -> None:
        """Return when the script has ended on every worker; ``regroup`` enters a newer generation meanwhile."""
        self._reporter.report(script_ended=True)
        while self._reporter.is_heard and not self._membership.wait_finish(self._participant.ledger.generation):
            regroup()
        self._reporter.report(complete=True, step=self._participant.step, digest=self.digest)
        self._membership.close()

    def _own(self, generation: int) -> bytes:
        return msgspec.msgpack.encode(AtEnd(self._worker_id, generation, self._lifecycle.applied))

    @property
    def rank_and_size(self) -> tuple[int, int] | None:
        """(rank, number of ranks), fixed until the next loop; None before the end."""
        seats = self._seats
        return (seats.index(self._worker_id), len(seats)) if self._worker_id in seats else None

    @property
    def leader(self) -> str | None:
        """The worker with rank 0; None before the end."""
        return next(iter(self._seats), None)

    @property
    def _seats(self) -> list[str]:
        return seats_of(self.company, self._participant.ledger.members) if self.company else []


def seats_of(company: Sequence[str], members: Sequence[str]) -> list[str]:
    """Return the workers by rank after a loop that ``company`` ended, for the current ``members``.

    A later joiner takes the rank of a worker that was lost since, and does that worker's work there.
    """
    seats = list(company)
    newcomers = [worker_id for worker_id in members if worker_id not in seats]
    vacant = [rank for rank, worker_id in enumerate(seats) if worker_id not in members]
    for rank, worker_id in zip(vacant, newcomers, strict=False):
        seats[rank] = worker_id
    return seats + newcomers[len(vacant) :]


def step_at_end(outside: PreLoopCalls, loop: int) -> int:
    """Return the committed steps of a loop that the job ended before this worker joined."""
    return _decode(outside.result_of(f"{meeting_at_end(loop)}/0")[0]).step
