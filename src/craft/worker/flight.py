"""The step in flight: microbatches computed here, held, exchanged, and committed with everybody else.

The inner loop of the user's script drives it, on the main thread: ``begin``, then ``next_microbatch`` until that says that
the step is committed, with ``start`` and ``hold`` around each microbatch. Failures show only here, as more microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from craft.decide import ledger as books
from craft.protocol.errors import BitsDiffer
from craft.protocol.membership import DROPPED, Generation, Settlement
from craft.protocol.word import Combined, Record, Word
from craft.snapshots.state import Leaf, RotatingDigest
from craft.worker import tidings
from craft.worker.bits import check_bits, check_sample, hash_of, sample_of
from craft.worker.buffers import Buffers
from craft.worker.commit import Commitments
from craft.worker.exchange import Attempt, ExchangeThread
from craft.worker.follow import Result
from craft.worker.gradients import Flats, Gradients, hand_out
from craft.worker.layout import Layout
from craft.worker.numbers import Numbers
from craft.worker.points import reach
from craft.worker.route import Route
from craft.worker.routes import route_of
from craft.worker.voice import Voice

logger = logging.getLogger(__name__)

PROBE = -1
"""In place of a microbatch: microbatch 0 is computed once more, only to compare its bits."""


class Flight:
    """Drives the step in flight from its first microbatch to its commit."""

    def __init__(
        self,
        commitments: Commitments,
        exchange: ExchangeThread,
        gradients: Gradients,
        buffers: Buffers,
        digest: RotatingDigest,
        leaves: Callable[[], list[Leaf]],
        size_of: Callable[[int], int],
        on_settled: Callable[[Settlement, bool], None],
        voice: Voice,
        numbers: Numbers,
        extra_word: Callable[[int], dict[str, Any]],
    ) -> None:
        """``on_settled(settlement, level)``: whether the state here is that of the step that goes on, or an update is due."""
        self.gradients = gradients
        self.stop_reason: str | None = None
        self.combined: Combined | None = None
        """The word of the step that was committed last."""
        self.plan: tuple[str | None, ...] = ()
        """Who computed which microbatch of that step; None for one that was dropped."""
        self.members: tuple[str, ...] = ()
        self.generation = 0
        """Under which generation that step was committed, and its members."""
        self.under: Generation | None = None
        """The generation in which its result came about: the same on every worker, whenever each of them committed it."""
        self.probe_wanted = False
        self.compares = False
        """Whether a worker that joins compares bits with the others before anything that it computes counts."""
        self.num_computed = 0
        """Microbatches that the script computed here since the last commit."""
        self.undo: Callable[[], None] = lambda: None
        """Puts the state back to that of the last commit, where the script's update comes before the commit."""
        self.waited_s = 0.0
        """In the exchange of the step that was committed last: how long this worker waited for what the others computed."""
        self._commitments = commitments
        self._exchange = exchange
        self._buffers = buffers
        self._digest = digest
        self._leaves = leaves
        self._size_of = size_of
        self._on_settled = on_settled
        self._voice = voice
        self._numbers = numbers
        self._extra_word = extra_word
        """Gives what else goes into the word of a step."""
        self._records: dict[int, Record] = {}
        self._attempt: Attempt | None = None
        self._route: Route | None = None
        self._result: Flats | None = None
        self._probe = b""
        self._sample = b""
        """Of microbatch 0, if it was computed here: what is told to whoever catches up, or was found while catching up."""
        self._state_digest: Callable[[], bytes] = bytes
        self._late = False
        self._overlaps = False
        """Whether what is computed now is exchanged bucket by bucket while its backward goes on."""
        self._wait_for_all = False
        """Whether nothing of this step is exchanged before all of it is computed."""
        self._told = False
        """Whether it was said that there are no gradients."""

    @property
    def step(self) -> int:
        return self._commitments.step

    def begin(self) -> None:
        """A step begins; enter a newer generation first, if there is one."""
        self._buffers.begin()
        self.keep_pace()

    def keep_pace(self) -> None:
        """Do at a step boundary what all do there, and take part in the step that begins."""
        if not self._commitments.agree(self.combined):
            # Before anything else: what this worker was to compute is its own, and must not be taken for lost. Unless all
            # enter a generation here that they prepared for: then the step is planned anew, and nothing is.
            self._commitments.ledger = books.begin(self._commitments.ledger, self._size_of(self.step))
        if self._commitments.moved:
            self._regroup()
        self.take_up()

    def take_up(self) -> None:
        """Look at the state as of the last commit, and take part in the exchange from here on."""
        if self._digest.due(self.step):
            self._digest.refresh(self._leaves())
        self._sample = b""
        # Now, while the state is that of the last commit: forward changes buffers.
        self._state_digest = self._digest.take(self.step)
        self._commitments.ledger = books.begin(self._commitments.ledger, self._size_of(self.step))
        self._start_attempt()

    def next_microbatch(self) -> int | None:
        """Return what to compute next (or PROBE), or None once the step is committed. A safe point."""
        step = self.step
        while True:
            if self._commitments.moved:
                self._regroup()
                if self.step > step:
                    return None
                self._start_attempt()
            if self._probe_due():
                return PROBE
            if self._commitments.ledger.pending:
                return self._commitments.ledger.pending[0]
            if self._exchange_held():
                return None

    def _probe_due(self) -> bool:
        ledger = self._commitments.ledger
        alone = len(ledger.members) == 1
        # The owner of microbatch 0 computes it anyway; a retry has no use for the comparison.
        return self.probe_wanted and not (self._probe or ledger.held or alone or 0 in ledger.share)

    def start(self, microbatch: int, weight: float) -> None:
        """The user's code computes ``microbatch`` now."""
        last = self._commitments.ledger.pending == (microbatch,)
        # What is to be hashed must not be overwritten by the result meanwhile.
        hashed = self.gradients.in_place and self._hasher(microbatch) is not None
        self._overlaps = last and not (self._wait_for_all or hashed)
        lent = self._result if self.gradients.in_place and (last or microbatch == PROBE) else None
        self._buffers.restore()
        if microbatch == PROBE:
            self.gradients.start(0, 1, None, lent)
        else:
            flushed = self._overlap if self._overlaps else None
            self.gradients.start(microbatch, self._size_of(self.step), flushed, lent)
        self.gradients.weigh(weight)

    def _overlap(self, bucket: int) -> None:
        """A bucket is ready while backward goes on; the last one is left to the main thread."""
        reach("flushed", self.step)
        if self._attempt is not None and bucket < len(self.gradients.layout.buckets) - 1:
            assert self._route is not None
            self._route.flushed(bucket)
            self._exchange.give(self._attempt, bucket)

    def hold(self, microbatch: int, scalars: dict[str, float], more: bool) -> None:
        """The user's code is done with ``microbatch``: its gradient is ours until the step is committed."""
        self.num_computed += 1
        hasher = self._hasher(microbatch)
        leaf = None if microbatch == PROBE else self.gradients.finish(hasher)
        digest = leaf.digest if leaf is not None else self.gradients.discard(hasher)
        if hasher is hash_of:
            self._probe = digest
        elif hasher is sample_of:
            self._sample = digest
        if leaf is None:
            return
        self._keep(
            Record(
                microbatch=microbatch,
                weight=leaf.weight,
                present=leaf.present,
                scalars=tuple(sorted(scalars.items())),
                more=more,
            )
        )
        self._late = self._late or (leaf.late and self._overlaps)

    def _hasher(self, microbatch: int) -> Callable[[Flats], bytes] | None:
        """What is to be known of the gradient of ``microbatch``, if anything is. A joiner that warms up computes PROBE."""
        if microbatch not in (0, PROBE):
            return None
        if self.probe_wanted:
            return hash_of
        return sample_of if self.compares and (microbatch == PROBE or self._commitments.ledger.idle) else None

    def hold_empty(self, microbatch: int) -> None:
        """The microbatch's stream has ended: it weighs nothing."""
        if microbatch == PROBE:
            self.probe_wanted = False
            return
        leaf = self.gradients.hold_empty(microbatch, self._size_of(self.step))
        self._keep(Record(microbatch=microbatch, weight=0.0, present=leaf.present, more=False, data=False))

    # Of a loop of the script's own, which computes all of its share before anything of it is held.

    def computed(self, microbatch: int, weight: float, scalars: dict[str, float]) -> None:
        """The body of an attempt is done with ``microbatch``: there is nothing to exchange of it any more."""
        self.num_computed += 1
        leaf = self.gradients.hold_empty(microbatch, self._size_of(self.step))
        logged = tuple(sorted(scalars.items()))
        self._keep(Record(microbatch=microbatch, weight=weight, present=leaf.present, scalars=logged))

    def conclude(self) -> bool:
        """Commit the step with everybody; False if it has to be computed again, from the state before it."""
        return (not self._commitments.moved and self._exchange_held()) or self.interrupt()

    def interrupt(self) -> bool:
        """A newer generation is there: True if the step is committed by what is in hand, False if it is taken back."""
        step = self.step
        self._regroup()
        if self.step > step:
            return True
        self._commitments.ledger = books.taken_back(self._commitments.ledger)
        self.gradients.clear()
        self._records.clear()
        self._start_attempt()
        return False

    def _keep(self, record: Record) -> None:
        self._records[record.microbatch] = record
        if record.microbatch == 0:
            self._buffers.keep_first()
        self._commitments.ledger = books.hold(self._commitments.ledger, record.microbatch)

    def _start_attempt(self) -> None:
        """Make ready for the exchange of the step in flight, under the plan as it is now."""
        ledger, layout = self._commitments.ledger, self.gradients.layout
        if self._route is not None and self._route.group is not self._commitments.group:
            # A generation was entered between the steps. What the old group was to receive into may still be written to.
            self._route, self._result = None, None
        if self._route is None or self._route.owners != ledger.owners:
            commitments = self._commitments
            self._route = route_of(commitments.group, commitments.hosts, layout, ledger.owners)
        if self._result is None:
            self._result = Flats(layout)
        attempt = Attempt(self.step, self._commitments.group, self._route, self.gradients, self._result)
        attempt.under = self._commitments.generation
        attempt.plan = tuple(None if owner == DROPPED else ledger.members[owner] for owner in ledger.owners)
        attempt.buffers_like = self._buffers.empty_like
        attempt.tell(lambda: tidings.tell(self._commitments.group, ledger, layout))
        self._attempt = attempt

    def _exchange_held(self) -> bool:
        """Exchange what is held; True if that committed the step."""
        attempt, route = self._attempt, self._route
        assert attempt is not None and route is not None
        began = monotonic()
        self._exchange.wait()
        # The thread waited for others while this one computed: only what is waited for from here on holds it up.
        route.waited_s = monotonic() - began
        if attempt.finish(lambda: self._word(attempt)):
            assert attempt.combined is not None
            if attempt.combined.resend:
                self._resend()
                return False
            self._compare_bits(attempt.combined)
            self._commitments.completed()
            idle = self._commitments.ledger.idle
            self._commitments.all_acknowledged(attempt.combined)
            if self._commitments.ledger.idle != idle:
                # Somebody keeps pace from here on: all look at the same slices of the state from the next step on.
                self._digest.restart(self.step)
            self._committed(attempt)
            self.waited_s = route.waited_s
            return True
        self._voice.broke(attempt)
        self._commitments.await_move()
        return False

    def _resend(self) -> None:
        """Somebody's gradient came after its bucket was sent: all send again."""
        if self.gradients.in_place:
            self._let_go()
        self._late = False
        self._start_attempt()

    def _let_go(self) -> None:
        """What was sent is not held any more, or not as it was: it is computed again."""
        self._commitments.ledger = books.let_go(self._commitments.ledger)
        self.gradients.drop()
        self._records.clear()
        self._result = None
        # If a gradient came late, a second time none does.
        self._wait_for_all, self._late = self._wait_for_all or self._late, False

    def _word(self, attempt: Attempt) -> Word:
        held = sorted(self._commitments.ledger.held)
        changed = self._buffers.changed if 0 in held else ()
        if changed:
            attempt.buffers = self._buffers.pack()
        return Word(
            step=self.step,
            records=tuple(self._records[microbatch] for microbatch in held),
            ready=self._commitments.ready,
            able=self._commitments.ledger.able,
            stop=self.stop_reason,
            resend=self._late,
            digest=self._state_digest(),
            probe=self._probe,
            buffers=changed,
            rewinds=self._commitments.ledger.rewinds,
            sample=self._sample,
            **self._extra_word(self.step),
        )

    def _regroup(self) -> None:
        """Follow into the newest generation; afterwards the step in flight is committed, or goes on under a new plan."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            # The old group is aborted already, so this returns at once.
            self._exchange.wait()
            if attempt.usable:
                self._commitments.check_leaving(attempt.combined)
                self._commitments.completed()
            if attempt.begun and (self.gradients.lets_go or (self.gradients.in_place and self._late)):
                self._let_go()
        # What the old group was to receive into may still be written to.
        self._route, self._result = None, None
        settlement = self._commitments.regroup(self._size_of)
        self._state_digest = bytes
        commits = self._commitments.ledger.worker_id in settlement.commits
        if commits:
            assert attempt is not None
            self._committed(attempt)
        else:
            # Between two microbatches the buffers are those of neither.
            self._buffers.restore()
            # Before anybody is given the state.
            self.undo()
            self.gradients.fetch()
        self._on_settled(settlement, not commits)

    def _compare_bits(self, combined: Combined) -> None:
        try:
            check_bits(combined, self._commitments.ledger.members, self._digest.names)
        except BitsDiffer as error:
            self._voice.diverged(error, combined.step, self._commitments.ledger.members)
            raise

    def _committed(self, attempt: Attempt) -> None:
        """Hand the result to the user's update code: gradients, buffers, metrics."""
        ledger = self._commitments.ledger
        self._hand_over(attempt, self.gradients.layout, ledger.generation, ledger.members)
        self.gradients.clear()
        self._records.clear()
        self._attempt = None
        self._late = self._wait_for_all = False
        self._probe = self._sample = b""
        reach("committed", attempt.step)

    def replay(self, result: Result) -> None:
        """Hand over the result of a step that was committed while this worker's state was on the way."""
        own, self._sample = self._sample, b""
        check_sample(own, result.combined)
        self._hand_over(result.attempt, result.layout, result.generation, result.members)
        reach("replayed", result.attempt.step)

    @torch.no_grad()
    def _hand_over(self, attempt: Attempt, layout: Layout, generation: int, members: tuple[str, ...]) -> None:
        combined = attempt.combined
        assert combined is not None
        if combined.total_weight and layout.buckets and not (any(combined.present) or self._told):
            self._told = True
            logger.warning(
                "step %d: no parameter got a gradient. loss.backward() in the inner loop makes them; what is put into p.grad"
                " by hand is not seen", attempt.step,
            )  # fmt: skip
        num_present = sum(1 for worker_id in attempt.plan if worker_id is not None)
        scale = num_present / combined.total_weight if combined.total_weight else 1.0
        hand_out(layout, attempt.result, combined.present, scale)
        # Where nothing weighs anything, what was logged is for people only.
        metrics = combined.metrics if combined.total_weight else ()
        if self._numbers.look(attempt.step, metrics, layout, attempt.result.tensors):
            self._buffers.commit(combined.buffers, attempt.buffers)
        else:
            self._numbers.leave_out([param for bucket in layout.buckets for param in bucket.params])
            self._buffers.commit((), None)
        self.combined, self.plan, self.under = combined, attempt.plan, attempt.under
        self.generation, self.members = generation, members
        self.num_computed, self.waited_s = 0, 0.0
