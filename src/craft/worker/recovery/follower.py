"""A thread that takes part in the exchange for a joiner while it fetches its state and catches up.

It takes and acknowledges every result at once, so that no worker waits for the joiner, and queues it. The main thread loads the
state when it is complete, then replays the queued results through the script's update code. Once it has caught up, or the others
count on the joiner, the thread ends and the main thread takes over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch

from craft.protocol.control_word import Combined, Word
from craft.protocol.errors import BitsDiffer, GroupError, SnapshotAborted, SnapshotError, StateLost, Unreachable
from craft.protocol.membership import Generation, Settlement
from craft.snapshots.transfer.fetch import Fetched
from craft.telemetry.fault_points import reach
from craft.worker.membership.participant import Participant
from craft.worker.recovery.state_transfer import donors_of
from craft.worker.reduce import trainable_mask
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.attempt_builder import AttemptBuilder
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.user_reduce import Reduced

logger = logging.getLogger(__name__)

_LOOK_S = 0.01

Fetch = Callable[[Generation, tuple[str, ...], threading.Event], Fetched]
"""(generation, its donors in order, cancelled) -> the state as of the settlement."""


class CommittedResult(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step, to be replayed."""

    attempt: Attempt
    combined: Combined
    layout: BucketLayout
    generation: int
    members: tuple[str, ...]
    able: bool
    """Whether this worker reported with it that it can compute: the others then count on it from the next step on."""


class Follower:
    """Gives the main thread the state and results; when ``next`` returns None, the main thread takes over."""

    def __init__(
        self,
        participant: Participant,
        layout: Callable[[Sequence[bool] | None], BucketLayout],
        buffers_like: Callable[[tuple[int, ...]], torch.Tensor],
        size_of: Callable[[int], int],
        fetch: Fetch,
        on_settled: Callable[[Settlement], object],
        on_broken: Callable[[Exception], None],
        listen: Callable[[Participant], tuple[Reduced, ...]] | None = None,
    ) -> None:
        """``layout`` returns what the others train, as of the last settlement unless given.

        ``listen`` takes the reductions that ``job.attempts`` makes before the end of a step.
        """
        self._participant = participant
        self._layout = layout
        self._size_of = size_of
        self._fetch = fetch
        self._on_settled = on_settled
        self._on_broken = on_broken
        self._listen = listen
        self._gradients: GradientAccumulator | None = None
        self._builder = AttemptBuilder(participant, buffers_like)
        # Guards everything below, which this thread, the fetching thread and the main thread share.
        self._change = threading.Condition()
        self._results: deque[CommittedResult] = deque()
        self._state: Fetched | None = None
        self._loaded = False
        self._replayed = False
        """Whether the main thread has taken a result: when it waits for another, the script's update has run once."""
        self._main_waits = False
        self._cancelled = threading.Event()
        self._error: BaseException | None = None
        self._ended = False

    def start(self, settlement: Settlement) -> None:
        """Start following, from the settlement in which this worker joins."""
        threading.Thread(target=self._run, args=(settlement,), name="craft-follow", daemon=True).start()

    # On the main thread.

    def wait_state(self) -> Fetched:
        """Return the state, once it is complete."""
        with self._change:
            self._change.wait_for(lambda: self._state is not None or self._error is not None)
            if self._error is not None:
                raise self._error
            assert self._state is not None
            self._loaded = True
            return self._state

    @property
    def level(self) -> bool:
        """Whether the main thread must take part in the exchange: nothing is queued, and nothing will be."""
        with self._change:
            return self._ended and not self._results and self._error is None

    @property
    def runs(self) -> bool:
        """Whether the thread takes part in exchanges and generations; otherwise the main thread must."""
        with self._change:
            return not self._ended

    @property
    def has_results(self) -> bool:
        """Whether a result is queued that can be replayed at once."""
        with self._change:
            return bool(self._results)

    def next(self) -> CommittedResult | None:
        """Return the next result to replay; None once the main thread must take part itself."""
        with self._change:
            self._main_waits = not self._results
            self._change.notify_all()
            self._change.wait_for(lambda: bool(self._results) or self._ended)
            self._main_waits = False
            if self._results:
                self._replayed = True
                return self._results.popleft()
            if self._error is not None:
                raise self._error
            return None

    # On the follower's thread.

    def _run(self, settlement: Settlement) -> None:
        try:
            self._on_settled(settlement)
            self._begin(settlement)
            while True:
                if self._participant.moved:
                    self._regroup(None)
                elif not self._has_nothing_to_take():
                    self._take_one()
                elif self._state_came():
                    break
        except _TakenOver:
            return
        except BaseException as error:  # noqa: BLE001  (the edge of a thread: the main thread raises it)
            self._error = error
        self._adopt()
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _begin(self, settlement: Settlement) -> None:
        """Prepare for a settled generation; fetch the state as of it, unless the state is complete."""
        self._builder.drop_route()
        self._gradients = GradientAccumulator(self._layout(None), hooked=False)
        if self._participant.ledger.has_state:
            return
        with self._change:
            self._results.clear()
            self._cancelled = threading.Event()
        generation = self._participant.generation
        assert generation is not None
        ledger = self._participant.ledger
        donors = donors_of(generation, settlement, ledger.layout.position_of(ledger.rank))
        args = (generation, donors, self._cancelled)
        threading.Thread(target=self._get_state, args=args, name="craft-heal", daemon=True).start()

    def _get_state(self, generation: Generation, donors: tuple[str, ...], cancelled: threading.Event) -> None:
        began = time.monotonic()
        try:
            state = self._fetch(generation, donors, cancelled)
        except SnapshotAborted:
            return
        except (SnapshotError, Unreachable) as error:
            # All workers soon miss a donor that died; the lighthouse judges one that is unreachable.
            logger.warning("the state did not come over: %s", error)
            if not cancelled.is_set():
                self._on_broken(error)
            return
        except BaseException as error:  # noqa: BLE001  (the edge of a thread)
            with self._change:
                self._error = error
                self._change.notify_all()
            return
        with self._change:
            if not cancelled.is_set():
                self._state = state
                self._change.notify_all()
        took_s = time.monotonic() - began
        logger.info("fetched %d bytes from %d donors in %.3f s", state.header.total_bytes, len(donors), took_s)
        reach("fetched", state.level)

    def _adopt(self) -> None:
        """Adopt the state if it has arrived: with the queued results this worker is current."""
        with self._change:
            if self._state is None:
                # Too late from now on: it would be the state of an older generation.
                self._cancelled.set()
            elif not self._participant.ledger.has_state:
                self._participant.adopt_state()

    @property
    def _has_state(self) -> bool:
        with self._change:
            return self._state is not None

    def _state_came(self) -> bool:
        """Wait briefly; return True once the state is here, and with it everything."""
        with self._change:
            return self._change.wait_for(lambda: self._state is not None, _LOOK_S)

    def _has_nothing_to_take(self) -> bool:
        """Return whether all steps are over, or the others count on this worker in the next one."""
        ledger = self._participant.ledger
        if ledger.over or self._size_of(ledger.step) == 0 or ledger.worker_id not in ledger.idle:
            return True
        with self._change:
            last = self._results[-1].combined if self._results else None
            return last is not None and (last.ended or last.stop is not None)

    def _take_one(self) -> None:
        """Take part in one step, without computing a microbatch."""
        participant = self._participant
        participant.begin_step(self._size_of(participant.step))
        try:
            self._lay_out()
        except GroupError as error:
            self._on_broken(error)
            participant.await_move()
            self._regroup(None)
            return
        assert self._gradients is not None
        attempt = self._builder.build(self._gradients, Flats(self._gradients.layout))
        if self._heard(attempt) and attempt.finish(self._word):
            combined = attempt.combined
            assert combined is not None
            if combined.resend:
                return
            if combined.outcasts:
                # Another joiner has to leave: the step is repeated without it.
                participant.await_move()
                self._regroup(attempt)
                return
            if combined.differs:
                raise BitsDiffer(f"the others found that their states differ after step {combined.step}")
            participant.completed()
            participant.all_acknowledged(combined)
            self._put(attempt, participant.ledger.rank in combined.able)
            # This worker may have reported itself ready: then it enters the prepared generation at this boundary, as all do.
            # (If the main thread takes over, it does the same.)
            participant.agree(combined)
            return
        if attempt.error is not None:
            self._on_broken(attempt.error)
        participant.await_move()
        self._regroup(attempt)

    def _lay_out(self) -> None:
        """Lay out the buckets again if the others froze or unfroze parameters in code that has not run here yet."""
        assert self._gradients is not None
        before = self._gradients.layout
        trained = trainable_mask.hear(self._participant.group, self._participant.ledger, before)
        if trained != before.trainable:
            self._builder.drop_route()
            self._gradients = GradientAccumulator(self._layout(trained), hooked=False)

    def _word(self) -> Word:
        ledger = self._participant.ledger
        # No worker may leave before this one has the state: it might be the only one to keep it.
        ready = self._participant.ready if self._has_state else ledger.generation
        return Word(step=ledger.step, ready=ready, able=self._is_awaited, rewinds=ledger.rewinds)

    @property
    def _is_awaited(self) -> bool:
        """Whether the main thread only waits for the result in flight; with that result it takes over."""
        with self._change:
            return self._main_waits and self._replayed and not self._results

    def _heard(self, attempt: Attempt) -> bool:
        """Take the step's reductions; return False if a worker was lost meanwhile."""
        try:
            if self._listen is not None:
                attempt.reductions = self._listen(self._participant)
        except GroupError as error:
            attempt.error = error
        return attempt.error is None

    def _regroup(self, attempt: Attempt | None) -> None:
        if attempt is not None and attempt.usable:
            self._participant.check_leaving(attempt.combined)
            self._participant.completed()
        self._adopt()
        try:
            settlement = self._participant.regroup(self._size_of)
        except StateLost:
            with self._change:
                self._results.clear()
            raise
        # First: if the main thread takes over with this result, no other code reports the settlement.
        self._on_settled(settlement)
        if self._participant.ledger.worker_id in settlement.commits:
            assert attempt is not None
            self._put(attempt)
        self._begin(settlement)

    def _put(self, attempt: Attempt, able: bool = False) -> None:
        """Queue a result. If the main thread waits for this one, it is current and takes over.

        ``able``: the others count on that.
        """
        combined, gradients = attempt.combined, self._gradients
        assert combined is not None and gradients is not None
        ledger = self._participant.ledger
        result = CommittedResult(
            attempt=attempt,
            combined=combined,
            layout=gradients.layout,
            generation=ledger.generation,
            members=ledger.members,
            able=able,
        )
        with self._change:
            level = self._main_waits and self._loaded and not self._results
            self._results.append(result)
            if level:
                if not ledger.has_state:
                    self._participant.adopt_state()
                self._ended = True
            self._change.notify_all()
        if level:
            raise _TakenOver


class _TakenOver(Exception):
    """The main thread takes over from this one."""
