"""``job.attempts(...)``: a training loop whose body the script owns, with ``with attempt:`` around each step.

The body computes this worker's microbatches, has their gradients reduced, and updates the state, as often and in any order it
likes. At its end all workers commit the step together, or all undo it: the state is then what it was before, and the next attempt
is at the same step, with other shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch

from craft.protocol.errors import BitsDiffer, ConfigError, GroupError
from craft.protocol.values.activity import Phase as Doing
from craft.snapshots.state.device_copy import hold_back
from craft.telemetry.fault_points import reach
from craft.worker.data import rng
from craft.worker.loop.inner_loop.microbatch import ScriptNotes
from craft.worker.loop.inner_loop.phase_work import ComparedWork, PhaseWork, safe_point
from craft.worker.loop.inner_loop.repeated_step import RepeatedStep
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.membership.ft_calls import taking_part
from craft.worker.monitor.repeated_microbatch import PROBE
from craft.worker.recovery.follower import CommittedResult
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.user_reduce import Reduced, ReducePhase, UserReductions, listen
from craft.worker.report.metrics import checked

_CALLS = ("all_reduce", "broadcast_object", "barrier")


class StepAttempt:
    """One attempt at a step; ``with attempt:`` encloses its body.

    All workers commit its updates together, or all undo them, as after a loss; the next attempt is then at the same step.
    """

    def __init__(self, loop: Attempts, step: int, number: int) -> None:
        self._loop = loop
        self.step = step
        """Number of the step, from 0."""
        self.number = number
        """Number of this attempt at the step, from 0."""
        self.committed = False
        """Whether the step is committed; False after an attempt that was undone."""
        self.metrics: dict[str, float] = {}
        """Means of the logged scalars over all microbatches; filled when the loop over the microbatches ends."""
        self.microbatch: int | None = None
        """Microbatch being computed; None outside the loop over the microbatches."""
        self.notes = ScriptNotes()
        self.scalars: dict[int, dict[str, float]] = {}
        """Logged scalars by microbatch."""
        self.outcomes: tuple[Reduced, ...] | None = None
        self.entered = self.left = False
        self.broken = False
        self.num_phases = 0
        self._in_phase = False

    @property
    def _done(self) -> bool:
        return self.committed

    _is_ahead = False
    """Always False: the script makes no calls before the body, because the body may run more than once."""

    @property
    def _place(self) -> tuple[int, int | None]:
        return self.step, self.microbatch

    @property
    def _company(self) -> tuple[int, int] | None:
        """(position, count) of this worker among the body's participants; None outside the body."""
        return self._loop.company(self) if self.entered and not self.left else None

    @property
    def _call(self) -> Callable[[str, bytes], list[bytes]] | None:
        """The function for collective calls in the body; None outside it, where calls go as between any two steps."""
        return self._made if self.entered and not self.left else None

    def _made(self, call: str, data: bytes) -> list[bytes]:
        if self._in_phase or call not in _CALLS:
            raise ConfigError(
                f"job.{call}() "
                + ("in the loop over attempt.microbatches(...)" if self._in_phase else "within `with attempt:`")
                + f": {', '.join(_CALLS)} may be called in the body of an attempt, outside of that loop; the rest after it"
            )
        try:
            return self._loop.call(self, call, data)
        except GroupError:
            self.broken = True
            raise

    def __enter__(self) -> StepAttempt:
        if self.entered:
            raise ConfigError(f"an attempt at step {self.step} was entered twice: take the next one of job.attempts()")
        self.entered = True
        self._loop.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[True] | None:
        self.left = True
        if self.broken or isinstance(error, GroupError):
            self.microbatch = None
            self._loop.interrupted(self)
            return True
        if error is not None:
            return None
        if self._in_phase:
            self.microbatch = None
            raise ConfigError(
                f"step {self.step}: a loop over attempt.microbatches(...) was left before its end:"
                " it must run until it stops by itself"
            )
        self._loop.conclude(self)
        return None

    def microbatches(self, params: Iterable[torch.nn.Parameter] = ()) -> Iterator[Any]:
        """Yield this worker's microbatches, possibly none; afterwards ``p.grad`` is the mean over all microbatches.

        The mean is set for ``params``, on every worker. Each item is the microbatch's data or, in a loop without data, its
        number.
        """
        if not self.entered or self.committed:
            raise ConfigError("attempt.microbatches(...) belongs into `with attempt:`")
        if self._in_phase:
            raise ConfigError("attempt.microbatches(...) within another one: first that has to come to its end")
        self._in_phase = True
        try:
            yield from self._loop.microbatches(self, list(params))
        except GroupError:
            self.broken = True
            raise
        self._in_phase = False

    def carry(self, /, *, reset: bool = False, **initial: Any) -> NoReturn:
        """Refuse: a body may compute a microbatch several times, so CRAFT cannot know which run leaves the value."""
        raise ConfigError(
            "attempt.carry(...): values are carried from step to step by step.carry in job.steps() only; in a loop of your own,"
            " gather what all microbatches leave (job.all_reduce) and keep it in job.register_state(save=..., load=...)"
        )

    def gather(self, tensor: torch.Tensor) -> NoReturn:
        """Refuse: no other worker could run the first pass over this worker's microbatches in the script's body."""
        raise ConfigError(
            "attempt.gather(...): the rows of all microbatches are given by step.gather in job.steps() only; a loss over the"
            " whole batch, with an update by each optimizer, fits into the body of job.steps, too"
        )

    def log(self, /, **scalars: float | torch.Tensor) -> None:
        """Log scalars of this microbatch; ``metrics`` has their mean over all microbatches afterwards."""
        if self.microbatch is None:
            raise ConfigError("attempt.log(...) belongs into the loop over attempt.microbatches(...)")
        self.notes.scalars |= {name: float(value) for name, value in checked("attempt.log", scalars).items()}


class Attempts:
    """The loop over steps; it yields attempts at each step until one is committed."""

    def __init__(self, training: TrainingLoop) -> None:
        self._training = training
        self._modules = list(training.state.modules.values())
        self._buffers = ModuleBuffers(self._modules, graphs_live_on=True)
        self._reductions = UserReductions(training.participant, self._buffers, training.state.bucket_bytes)
        self._undo = training.undo
        self._rehearsal = RepeatedStep(training.state.leaves, enabled=training.settings.check_bits)
        self._compared: int | None = None
        """On a joiner: the step in which it computed microbatch 0 too, to compare its bits with the others'."""
        self._replayed: CommittedResult | None = None
        """On a worker that is catching up: the step as the others committed it."""
        # NCCL: no bucket of the step's regular exchange may come between the script's reductions.
        assert not training.exchange.gradients.layout.buckets

    def __iter__(self) -> Iterator[StepAttempt]:
        training = self._training
        with training.running():
            while training.wants_more():
                training.begin()
                self._replayed = training.joining.next_result()
                yield from self._tries(training.applied)

    def _tries(self, step: int) -> Iterator[StepAttempt]:
        """Yield attempts at a step until one is committed."""
        for number in itertools.count():
            attempt = self._training.current = StepAttempt(self, step, number)
            # A worker that starts at this step, such as a joiner, has drawn nothing in earlier steps.
            rng.seed_all(rng.derive(self._training.seed, rng.BEGIN, step))
            yield attempt
            if not attempt.entered:
                raise ConfigError(f"an attempt at step {step} was not entered: write `with attempt:`")
            if attempt.committed:
                return
            # Code after the `with` may have changed state: a scheduler that steps there would step twice.
            self._undo.put_back_again()

    def enter(self, attempt: StepAttempt) -> None:
        """Begin the body, from the state of the last commit."""
        training, ledger = self._training, self._training.participant.ledger
        if self._replayed is None:
            self._undo.take()
            training.source.expect(attempt.step, ledger.share)
        self._buffers.begin()
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        training.activity.now(Doing.UPDATING, attempt.step)
        rng.seed_all(rng.derive(training.seed, rng.UPDATE, attempt.step, 0))

    def microbatches(self, attempt: StepAttempt, params: list[torch.nn.Parameter]) -> Iterator[Any]:
        """Yield this worker's share of the step, then reduce the gradients."""
        training, place = self._training, attempt.num_phases
        phase = self._reductions.phase(params)
        if (outcomes := self._outcomes(attempt)) is None:
            yield from self._compute(attempt, phase, place)
        else:
            outcome = self._outcome(outcomes, attempt)
            if outcome.sample and self._compared in (None, attempt.step):
                self._compared = attempt.step
                due = iter([PROBE])
                work = ComparedWork(attempt.step, due, phase, self._buffers, training.source, outcome.sample)
                yield from training.inner_loop.run(attempt, work, place)
            attempt.metrics |= self._reductions.replay(phase, outcome)
        attempt.num_phases += 1
        training.activity.now(Doing.UPDATING, attempt.step)
        rng.seed_all(rng.derive(training.seed, rng.UPDATE, attempt.step, attempt.num_phases))

    def company(self, attempt: StepAttempt) -> tuple[int, int]:
        """Return this worker's position among the step's participants, and their number.

        A worker that only follows has position 0: its part is not used, and it must get the same result.
        """
        if (outcomes := self._outcomes(attempt)) is not None:
            return 0, next((len(each.parts) for each in outcomes if each.parts), 1)
        ranks, position = taking_part(self._training.participant)
        return position, len(ranks)

    def call(self, attempt: StepAttempt, name: str, data: bytes) -> list[bytes]:
        """Run a collective call in an attempt's body; a worker that only follows gets the result."""
        self._training.activity.now(Doing.EXCHANGING, attempt.step)
        if (outcomes := self._outcomes(attempt)) is None:
            safe_point(self._training.participant)
            parts = self._reductions.call(name, data)
        else:
            parts = list(self._outcome(outcomes, attempt).parts)
        attempt.num_phases += 1
        self._training.activity.now(Doing.UPDATING, attempt.step)
        return parts

    def _compute(self, attempt: StepAttempt, phase: ReducePhase, place: int) -> Iterator[Any]:
        training, step = self._training, attempt.step
        participant, ledger = training.participant, training.participant.ledger
        samples = training.settings.check_bits and bool(ledger.idle)
        due, source = iter(ledger.share), training.source
        work = PhaseWork(step, due, phase, self._buffers, source, participant, attempt.scalars, samples)
        yield from training.inner_loop.run(attempt, work, place)
        training.activity.now(Doing.EXCHANGING, step)
        attempt.metrics |= self._reductions.reduce(phase, place, work.records, work.sample)
        reach("reduced", step)

    def _outcomes(self, attempt: StepAttempt) -> tuple[Reduced, ...] | None:
        """Return the step's reductions if this worker only follows; None if it takes part in them."""
        if self._replayed is not None:
            return self._replayed.attempt.reductions
        participant = self._training.participant
        if participant.ledger.worker_id not in participant.ledger.idle:
            return None
        if attempt.outcomes is None:
            # This worker has just caught up; the others do not include it in this step yet.
            self._training.activity.now(Doing.EXCHANGING, attempt.step)
            try:
                attempt.outcomes = listen(participant)
            except GroupError as error:
                participant.broke(error)
                raise
        return attempt.outcomes

    def _outcome(self, outcomes: tuple[Reduced, ...], attempt: StepAttempt) -> Reduced:
        if attempt.num_phases >= len(outcomes):
            raise ConfigError(
                f"step {attempt.step}: the workers that train reduced {len(outcomes)} times in it, and this one wants to once"
                " more: the body of an attempt must do the same on every worker"
            )
        return outcomes[attempt.num_phases]

    def interrupted(self, attempt: StepAttempt) -> None:
        """Undo the step, with all workers, after a loss during the body."""
        training = self._training
        training.activity.now(Doing.EXCHANGING, attempt.step)
        self._buffers.put_registered_back(graphs_are_done=True)
        self._reductions.take_back()
        training.participant.await_move()
        self._settle(attempt, training.runner.interrupt(attempt.scalars))

    def conclude(self, attempt: StepAttempt) -> None:
        """End the body: commit the step with all workers, or undo it."""
        training = self._training
        self._buffers.put_registered_back(graphs_are_done=True)
        if self._replayed is not None:
            training.joining.replay(self._replayed)
            self._settle(attempt, True)
            return
        try:
            safe_point(self._training.participant)
            if self._outcomes(attempt) is None:
                self._reductions.end()
        except GroupError:
            self.interrupted(attempt)
            return
        if self._rehearsal.is_due(attempt.step, attempt.number, training.participant.ledger.idle):
            self._rehearsal.keep()
            self._undo.put_back()
            self._settle(attempt, False)
            return
        self._check_rehearsed(attempt.step)
        for microbatch in training.participant.ledger.share:
            weight = training.source.weight(attempt.step, microbatch)
            training.runner.computed(microbatch, weight, attempt.scalars.get(microbatch, {}))
        self._settle(attempt, training.conclude())

    def _check_rehearsed(self, step: int) -> None:
        try:
            self._rehearsal.check(step)
        except BitsDiffer as error:
            self._training.lifecycle.differs(error, step)
            raise

    def _settle(self, attempt: StepAttempt, committed: bool) -> None:
        if not committed:
            self._reductions.take_back()
            # A transfer to a joiner may still read the state, and the script continues after its `with`.
            hold_back()
            return
        self._undo.let_go()
        attempt.committed = True
        attempt.metrics = self._training.committed(attempt.step)
        rng.seed_all(rng.derive(self._training.seed, rng.UPDATE, attempt.step))


def numbers(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[int]:
    """Return the stream of a loop without data: each microbatch is its number, in every step."""
    return itertools.repeat(microbatch)
