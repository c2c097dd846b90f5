"""``job.attempts(...)``: a training loop whose body the script owns, with ``with attempt:`` around each step.

The body computes this worker's microbatches, has their gradients reduced, and updates the state, as often and in any order it
likes. At its end all workers commit the step together, or all undo it: the state is then what it was before, and the next attempt
is at the same step, with other shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from craft.protocol.errors import BitsDiffer, ConfigError, GroupError
from craft.protocol.values.activity import Phase as Doing
from craft.snapshots.state.device_copy import hold_back
from craft.telemetry.fault_points import reach
from craft.worker.api.step_attempt import StepAttempt
from craft.worker.data import rng
from craft.worker.loop.inner_loop.phase_work import ComparedWork, PhaseWork, safe_point
from craft.worker.loop.inner_loop.repeated_step import RepeatedStep
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.membership.ft_calls import taking_part
from craft.worker.recovery.follower import CommittedResult
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.user_reduce import Reduced, ReducePhase, UserReductions, listen


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
                work = ComparedWork(attempt.step, phase, self._buffers, training.source, outcome.sample)
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
        work = PhaseWork(
            step,
            training.participant,
            phase,
            self._buffers,
            training.source,
            attempt.scalars,
            samples=training.settings.check_bits,
        )
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
