"""What this worker holds of the step in flight, and the exchange of it with the other workers.

Input: the gradients of microbatches, as the script computes them. Output: an ``Attempt`` with the whole result. ``StepRunner``
drives it on the main thread, and decides what becomes of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic

import torch

from craft.protocol.control_word import MicrobatchRecord, Word
from craft.protocol.errors import GroupError
from craft.telemetry.fault_points import reach
from craft.worker.loop.inner_loop.batch_gather import BatchGather
from craft.worker.loop.trained_state import TrainedState
from craft.worker.monitor.repeated_microbatch import is_extra
from craft.worker.reduce import trainable_mask
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.attempt_builder import AttemptBuilder
from craft.worker.reduce.exchange import Attempt, ExchangeThread
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.word_parts import ConsistencyPart, LoopPart
from craft.worker.state.loop_context import LoopContext


class StepExchange:
    """The held microbatches of the step in flight, and the attempts at exchanging them."""

    def __init__(
        self,
        context: LoopContext,
        state: TrainedState,
        bits: Callable[[], ConsistencyPart],
        loop_part: Callable[[int, int], LoopPart],
    ) -> None:
        """``bits`` and ``loop_part`` give parts of this worker's word, when the word is sent."""
        self.gradients = state.new_gradients()
        self.gathering = BatchGather(context.device, context.source.samples, drops=context.drops)
        self.num_computed = 0
        """Microbatches that the script computed here since the last commit."""
        self._participant = context.participant
        self._broke = context.reporter.broke
        self._thread = ExchangeThread(context.reporter.broke)
        self._buffers = state.buffers
        self._size_of = context.source.size_of
        self._bits = bits
        self._loop_part = loop_part
        self._builder = AttemptBuilder(context.participant, state.buffers.empty_like)
        self._attempt: Attempt | None = None
        self._result: Flats | None = None
        self._records: dict[int, MicrobatchRecord] = {}
        self._carried: dict[int, torch.Tensor] = {}
        """Values that microbatches held here leave for the next step."""
        self._late = False
        self._overlaps = False
        """Whether the current microbatch is exchanged bucket by bucket during its backward."""
        self._wait_for_all = False
        """Whether nothing of this step is exchanged before all of it is computed."""

    @property
    def waited_s(self) -> float:
        """Time this worker waited for the others' microbatches in the last exchange."""
        return self._builder.route.waited_s

    def lay_out(self, gradients: GradientAccumulator) -> None:
        """Exchange other parameters from here on: code between the steps froze or unfroze some."""
        self.gradients.detach()
        self.gradients = gradients
        self._drop_route()

    def _drop_route(self) -> None:
        self._builder.drop_route()
        self._result = None

    def open(self) -> None:
        """Prepare the exchange of the step in flight, under the current plan."""
        if self._builder.group_changed:
            # A generation was entered between the steps. The old group may still write into its receive buffers.
            self._drop_route()
        if self._result is None:
            self._result = Flats(self.gradients.layout)
        self._attempt = self._builder.build(self.gradients, self._result)
        participant, layout = self._participant, self.gradients.layout
        self._attempt.tell(lambda: trainable_mask.tell(participant.group, participant.ledger, layout))

    def start(self, microbatch: int, weight: float, hashed: bool) -> None:
        """Begin ``microbatch``; ``hashed``: its gradient is hashed when it is complete."""
        gradients, lent, flushed = self.gradients, None, None
        place, size = (0, 1) if is_extra(microbatch) else (microbatch, self._size_of(self._participant.step))
        if self.gathering.in_use and not self.gathering.complete:
            # Its gradient is discarded: it has no place in the tree.
            place, size = 0, 1
        else:
            last = self._participant.ledger.pending == (microbatch,)
            # The result must not overwrite a gradient that is still to be hashed, and no exchange may run while a microbatch
            # is computed once more after the last one.
            self._overlaps = last and not (
                self._participant.ledger.layout.slots or self._wait_for_all or (gradients.in_place and hashed)
            )
            flushed = self._overlap if self._overlaps else None
            lent = self._result if gradients.in_place and (last or is_extra(microbatch)) else None
        gradients.start(place, size, flushed, lent)
        gradients.weigh(weight)

    def _overlap(self, bucket: int) -> None:
        """Start exchanging a bucket that is ready during backward; the last one is left to the main thread."""
        if self.gathering.in_first_pass:
            return
        reach("flushed", self._participant.step)
        if self._attempt is not None and bucket < len(self.gradients.layout.buckets) - 1:
            self._builder.route.flushed(bucket)
            self._thread.give(self._attempt, bucket)

    def hold(self, record: MicrobatchRecord, carried: torch.Tensor | None = None, late: bool = False) -> None:
        """Hold a computed microbatch until the step is committed.

        ``carried``: the values that it leaves for the next step. ``late``: a gradient came after its bucket was flushed.
        """
        self._records[record.microbatch] = record
        if carried is not None:
            self._carried[record.microbatch] = carried
        if record.microbatch == 0:
            self._buffers.keep_first()
        self._participant.hold(record.microbatch)
        self._late = self._late or (late and self._overlaps)

    def finish(self) -> Attempt:
        """Exchange everything held and the word; return the attempt, with an error if the group broke."""
        attempt = self._attempt
        assert attempt is not None
        began = monotonic()
        self._thread.wait()
        # The exchange thread waited while this one computed: only waits from here on delay this worker.
        self._builder.route.waited_s = monotonic() - began
        attempt.finish(lambda: self._word(attempt))
        return attempt

    def resend(self) -> None:
        """Exchange again: a worker's gradient came after its bucket was sent."""
        if self.gradients.in_place:
            self._let_go()
        self._late = False
        self.open()

    def report(self, generation: int, error: GroupError) -> None:
        """Report that the group of ``generation`` broke."""
        self._broke(generation, error)

    def hold_only(self, held: Collection[int]) -> None:
        """Hold ``held`` and nothing else, as settled: what is no longer all of a sum is computed again."""
        self.gradients.reject()
        summed = {microbatch for begin, end in self.gradients.nodes for microbatch in range(begin, end)}
        if summed != set(held):
            self._let_go()

    def leave(self) -> Attempt | None:
        """End the attempt in flight, whose group is aborted, and record what it leaves here; return it."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            # The group is aborted already, so this returns at once.
            self._thread.wait()
            if attempt.usable:
                self._participant.check_leaving(attempt.combined)
                self._participant.completed()
            if attempt.begun and (self.gradients.lets_go or (self.gradients.in_place and self._late)):
                self._let_go()
        # The old group may still write into its receive buffers.
        self._drop_route()
        return attempt

    def _let_go(self) -> None:
        """Drop gradients that were sent and are not held unchanged: they are computed again."""
        self._participant.release()
        self.gradients.drop()
        self._records.clear()
        self._carried.clear()
        self._result = None
        # A late gradient cannot be late again if nothing is sent early.
        self._wait_for_all, self._late = self._wait_for_all or self._late, False

    def clear(self) -> None:
        """Hold nothing any more: the step is committed, or undone."""
        self.gradients.clear()
        self._records.clear()
        self._carried.clear()
        self._attempt = None
        self._late = self._wait_for_all = False

    def close(self) -> None:
        """Remove the hooks from the parameters, and end the thread."""
        self.gradients.detach()
        self._thread.stop()

    def _word(self, attempt: Attempt) -> Word:
        participant, ledger = self._participant, self._participant.ledger
        held = sorted(ledger.held)
        changed = self._buffers.changed if 0 in held else ()
        if changed:
            attempt.buffers = self._buffers.pack()
        if rows := [self._carried[microbatch] for microbatch in held if microbatch in self._carried]:
            attempt.carried[ledger.rank] = torch.cat(rows)
        bits, loop = self._bits(), self._loop_part(participant.step, self.num_computed)
        return Word(
            step=participant.step,
            records=tuple(self._records[microbatch] for microbatch in held),
            ready=participant.ready,
            able=ledger.can_compute,
            stop=loop.stop,
            stop_is_final=loop.stop_is_final,
            resend=self._late,
            buffers=changed,
            rewinds=ledger.rewinds,
            touched=self._buffers.touched,
            digest=bits.digest,
            probe=bits.probe,
            sample=bits.sample,
            state=bits.state,
            whole=bits.whole,
            newcomer=bits.newcomer,
            agreed=bits.agreed,
            computed=bits.computed,
            repeated=bits.repeated,
            busy_us=loop.busy_us,
            save=loop.checkpoint.save,
            wish=loop.checkpoint.wish,
            busy=loop.checkpoint.busy,
            saved=loop.checkpoint.saved,
            leave=loop.checkpoint.leave,
        )
