"""One call of ``job.steps``: everything that the loop needs, put together, and what happens around each step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from craft.decide import ledger as books
from craft.protocol.activity import Phase
from craft.protocol.errors import BitsDiffer, ConfigError, GroupError, StateLost
from craft.protocol.events import Event, GenerationEntered, StateDiverged, StepRetried, StopRequested, WorkerLost
from craft.protocol.membership import DROPPED, Settlement
from craft.settings.worker import WorkerSettings
from craft.snapshots.donor import Donor
from craft.snapshots.reserve import Reserve
from craft.snapshots.state import Leaf, RotatingDigest, Stateful, digest, module_leaves, registered_leaves
from craft.worker.activity import Activity
from craft.worker.buffers import Buffers
from craft.worker.calls import Calls
from craft.worker.channel import Channel
from craft.worker.chronicle import Chronicle
from craft.worker.commit import Commitments
from craft.worker.data import Source
from craft.worker.exchange import Attempt, ExchangeThread
from craft.worker.flight import PROBE, Flight
from craft.worker.follow import Follower
from craft.worker.gather import gather
from craft.worker.gradients import Gradients
from craft.worker.heal import Healing
from craft.worker.layout import Layout, trainable_of
from craft.worker.meeting import Meeting
from craft.worker.points import reach
from craft.worker.start import Conditions, check_conditions, make_equal

if TYPE_CHECKING:
    from craft.worker.steps import Step

logger = logging.getLogger(__name__)

_SMOOTHING = 0.1
_STATE_IS_BUILT = 2
"""By this step optimizers have made their state: what a joiner will get is as large as it is going to be."""


class Training:
    """Owned by the main thread."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        meeting: Meeting,
        channel: Channel | None,
        activity: Activity,
        donor: Donor | None,
        reserve: Reserve | None,
        commitments: Commitments,
        modules: Mapping[str, torch.nn.Module],
        registered: Mapping[str, Stateful],
        source: Source,
        seed: int,
        total_steps: int | None,
        conditions: Conditions,
        emit: Callable[[Event], None],
    ) -> None:
        self.settings = settings
        self.commitments = commitments
        self.activity = activity
        self.source = source
        self.seed = seed
        self.total_steps = total_steps
        self.current: Step | None = None
        """The step that the script is in, or was in last."""
        self.stop_reason: str | None = None
        self.applied = 0
        """The step that the script is in: for a joiner that catches up, behind that of the others."""
        self._meeting = meeting
        self._channel = channel
        self._modules = modules
        self._registered = registered
        self._conditions = conditions
        self._emit = emit
        self._params = _parameters(modules)
        self._buffers = Buffers(list(modules.values()))
        self._exchange = ExchangeThread(self._exchange_broke)
        self._digest = RotatingDigest(settings.digest_bytes)
        self._chronicle = Chronicle(settings.run_dir, settings.worker_id)
        self.healing = Healing(donor, settings.state_key_bytes, commitments, modules, registered, conditions, reserve)
        self._calls = Calls(commitments, donor, settings.state_key_bytes, self._regroup_between_steps)
        self.follower: Follower | None = None
        self._warm = False
        self._expected: tuple[int, tuple[int, ...]] | None = None
        self._ended = False
        self._ended_loop = False
        self._last_commit = 0.0
        self._step_s = 0.0
        commitments.trainable = lambda: _bitmap(trainable_of(self._params))
        self.flight = self._new_flight()
        self.flight.probe_wanted = settings.check_bits

    def _new_flight(self) -> Flight:
        layout = Layout(self._params, self._bucket_bytes)
        return Flight(
            self.commitments,
            self._exchange,
            Gradients(layout),
            self._buffers,
            self._digest,
            self.leaves,
            self.source.size_of,
            self.settled,
            self._exchange_broke,
        )

    @property
    def _bucket_bytes(self) -> int:
        return int(self.settings.bucket_mb * (1 << 20))

    def leaves(self) -> list[Leaf]:
        """The whole training state."""
        return [*module_leaves(self._modules), *registered_leaves(self._registered)]

    def start(self) -> None:
        """Meet the others, and make sure that all begin from the same state under the same conditions."""
        self.activity.now(Phase.JOINING, 0)
        if self.settings.late:
            self.report(joined=True)
        settlement = self._regroup()
        # A loss meanwhile leads to another round, unless somebody has come through: then all have, and may be on their way.
        while not self.commitments.started:
            try:
                self._compare()
                self.commitments.started = True
            except GroupError as error:
                self._meeting.broke(self.commitments.ledger.generation, error)
                self.commitments.await_move()
                settlement = self._regroup()
        reach("started", self.commitments.step)
        self.report(total_steps=self.total_steps)
        if self.commitments.ledger.whole:
            self.applied = self.commitments.step
            self.settled(settlement, level=True)
        else:
            self._join(settlement)
        self._last_commit = time.time()

    def _regroup(self) -> Settlement:
        try:
            return self.commitments.regroup(self.source.size_of)
        except StateLost:
            self._state_lost()
            raise

    def _compare(self) -> None:
        group, members = self.commitments.group, self.commitments.ledger.members
        check_conditions(group, members, self._conditions)
        unequal = make_equal(group, members, self.leaves())
        if unequal is not None:
            logger.warning(
                "workers %s began with other parameters than %s (first: %s): all now have those of %s",
                ", ".join(unequal.worker_ids), unequal.source, unequal.first, unequal.source,
            )  # fmt: skip
            self.report(unequal=unequal)

    def _join(self, settlement: Settlement) -> None:
        """The others are on their way: take their state, while a thread takes the results of what they do meanwhile."""
        self.follower = Follower(
            self.commitments,
            self._layout_of_the_others,
            self._buffers.empty_like,
            self.source.size_of,
            self.healing.fetch,
            self._report_settled,
            self._follow_broke,
        )
        self.follower.start(settlement)
        try:
            fetched = self.follower.wait_state()
            self.healing.load(fetched)
        except StateLost:
            self._state_lost()
            raise
        for param, wanted in zip(self._params, self._others_train(), strict=True):
            param.requires_grad_(wanted)
        self._buffers.begin()
        self.applied = fetched.level
        self.flight.probe_wanted = False
        reach("loaded", self.applied)
        logger.info("took the state as of step %d, %d bytes", fetched.level, fetched.header.total_bytes)

    def _others_train(self) -> list[bool]:
        bits = int.from_bytes(self.commitments.trained, "little")
        return [bool(bits >> index & 1) for index in range(len(self._params))]

    def _layout_of_the_others(self) -> Layout:
        trained = self._others_train() if self.commitments.trained else None
        return Layout(self._params, self._bucket_bytes, trained)

    def wants_more(self) -> bool:
        if self._ended:
            return False
        self._meeting.step = self.applied
        return self.total_steps is None or self.applied < self.total_steps

    def begin(self) -> None:
        """The inner loop of a step begins."""
        # No longer the script's code: whoever waits here, for a generation to be entered, waits for others.
        self.activity.now(Phase.EXCHANGING, self.applied)
        if not self.flight.gradients.layout.fits():
            # Code between the steps froze or unfroze parameters, and does so on every worker.
            self.flight.gradients.detach()
            before, self.flight = self.flight, self._new_flight()
            self.flight.probe_wanted, self.flight.combined = before.probe_wanted, before.combined
        if self.follower is not None:
            self._buffers.begin()
            return
        self.healing.give()
        try:
            self.flight.begin()
        except StateLost:
            self._state_lost()
            raise

    def next_microbatch(self) -> int | None:
        """What the inner loop computes next; the data source is told what to expect."""
        if self.follower is not None and self._catches_up():
            if not self._warm:
                # First-call costs, such as compilation, are not everybody's: nobody waits for this one.
                self._warm = True
                return PROBE
            return self._replay()
        self.activity.now(Phase.EXCHANGING, self.applied)
        self.flight.stop_reason = self.stop_reason or self._meeting.winding_down
        try:
            microbatch = self.flight.next_microbatch()
        except BitsDiffer as error:
            self._diverged(error)
            raise
        except StateLost:
            self._state_lost()
            raise
        ledger = self.commitments.ledger
        if microbatch is not None and self._expected != (self.commitments.step, ledger.owners):
            self._expected = (self.commitments.step, ledger.owners)
            self.source.expect(self.commitments.step, ledger.share)
        return microbatch

    def _catches_up(self) -> bool:
        """Whether the script is behind the others; if it is not any more, take part in the exchange from here on."""
        assert self.follower is not None
        if not self.follower.level:
            return True
        self.follower = None
        self.commitments.ledger = books.keeps_pace(self.commitments.ledger)
        self._digest.restart(self.applied + 1)
        try:
            # What was replayed last may have said that all enter a generation at this boundary.
            self.flight.keep_pace()
        except StateLost:
            self._state_lost()
            raise
        logger.info("keeps pace with the others from step %d on", self.applied)
        return False

    def _replay(self) -> int | None:
        """Hand the next queued result to the script."""
        assert self.follower is not None
        self.activity.now(Phase.EXCHANGING, self.applied)
        try:
            result = self.follower.next()
        except BitsDiffer as error:
            self._diverged(error)
            raise
        except StateLost:
            self._state_lost()
            raise
        if result is None:
            return self.next_microbatch()
        self.flight.replay(result)
        return None

    def committed(self, number: int) -> dict[str, float]:
        """A step was committed: write it down and report it. Returns its metrics."""
        flight, ledger = self.flight, self.commitments.ledger
        combined = flight.combined
        assert combined is not None and combined.step == number == self.applied
        if combined.empty:
            raise ConfigError("the stream ended before it gave any data: there is nothing to train on")
        metrics = dict(combined.metrics)
        self._chronicle.committed(
            step=number,
            branch=ledger.branch,
            generation=flight.generation,
            members=flight.members,
            worker_id=ledger.worker_id,
            plan=flight.plan,
            metrics=metrics,
        )
        self.applied = number + 1
        self.activity.committed()
        self.activity.now(Phase.UPDATING, number)
        flight.probe_wanted = False
        self.healing.committed()
        if number == _STATE_IS_BUILT and self._channel is not None:
            self.report(urgent=False, carried_bytes=self.healing.carried_bytes())
        self._ended = combined.ended or combined.stop is not None
        if combined.stop is not None:
            self._emit(StopRequested(reason=combined.stop))
        now = time.time()
        elapsed, self._last_commit = now - self._last_commit, now
        self._step_s = elapsed if not self._step_s else self._step_s + _SMOOTHING * (elapsed - self._step_s)
        self.report(urgent=False, step=number + 1, metrics=metrics, step_s=self._step_s)
        return metrics

    # Between the steps.

    @property
    def behind(self) -> bool:
        """Whether this worker catches up: it takes no part in what the others do between the steps."""
        return self.follower is not None

    @property
    def num_keeping_pace(self) -> int:
        return len(self.commitments.ledger.members) - len(self.commitments.ledger.idle)

    @property
    def position(self) -> int:
        """This worker's place among those who keep pace."""
        ledger = self.commitments.ledger
        return [each for each in ledger.members if each not in ledger.idle].index(ledger.worker_id)

    def gather(self, data: bytes) -> list[bytes]:
        """Return everybody's bytes; between two steps only."""
        if self.current is None or not self.current.done or self._ended_loop:
            raise ConfigError(
                "job.evaluate, all_reduce, broadcast_object and barrier belong into the loop over job.steps, after the"
                " inner loop: there all workers are at the same place"
            )
        phase = Phase.EXCHANGING
        self.activity.now(phase, self.applied - 1)
        try:
            return self._calls.gather(data, self.applied, self.behind)
        finally:
            self.activity.now(Phase.UPDATING, self.applied - 1)

    def _regroup_between_steps(self) -> None:
        # The update of the step that was committed last may be half done: the state is nobody's yet.
        self.settled(self._regroup(), level=False)

    def end(self) -> None:
        """Every step is committed here; leave only when it is everywhere, as far as the others are still there."""
        if self.follower is not None:
            # It has nothing more to take: the last results are replayed.
            assert self.follower.next() is None
            self.follower = None
        self._ended_loop = True
        self.activity.now(Phase.ENDING)
        self.healing.give()
        while True:
            try:
                # Once this returns, everybody has come here: nobody needs anything from this worker any more.
                gather(self.commitments.group, b"")
                break
            except GroupError as error:
                self._meeting.broke(self.commitments.ledger.generation, error)
                self.commitments.await_move()
                self.settled(self._regroup(), level=True)
        self._chronicle.complete()
        self.report(complete=True, step=self.commitments.step, digest=digest(self.leaves()))

    def close(self) -> None:
        self.flight.gradients.detach()
        self._meeting.close()
        self._exchange.stop()
        self.source.close()

    def settled(self, settlement: Settlement, level: bool) -> None:
        """A new generation is settled: tell the lighthouse, those who join, and the script if it wants to know.

        ``level``: whether the state here is that of the step that goes on; if not, the script's update comes first.
        """
        ledger = self.commitments.ledger
        # Whether it was in a step or still before its first one: from here on all look at the same slices.
        self._digest.restart(settlement.level + 1)
        self.healing.settled(settlement)
        if level:
            self.healing.give()
        retried = self._report_settled(settlement)
        if retried is not None:
            self._emit(retried)
        for worker_id in self.commitments.lost:
            reason = f"not in generation {ledger.generation}"
            self._emit(WorkerLost(worker_id=worker_id, reason=reason, source="peers"))
        self._emit(GenerationEntered(worker_id=ledger.worker_id, generation=ledger.generation))

    def _report_settled(self, settlement: Settlement) -> StepRetried | None:
        generation = self.commitments.ledger.generation
        dropped = tuple(index for index, owner in enumerate(settlement.owners) if owner == DROPPED)
        changes: dict[str, Any] = {"generation": generation, "broken": None}
        retried = None
        if settlement.given or dropped:
            retried = StepRetried(generation=generation, step=settlement.level, given=settlement.given, dropped=dropped)
            changes["retried"] = retried
        self.report(**changes)
        return retried

    def _exchange_broke(self, attempt: Attempt) -> None:
        """Say at once that the group broke; also on the exchange thread, since the main thread may compute for long."""
        if attempt.group is not None and attempt.error is not None:
            self._meeting.broke(attempt.group.generation, attempt.error)

    def _follow_broke(self, error: Exception) -> None:
        """The same on the thread that follows the exchange."""
        self._meeting.broke(self.commitments.ledger.generation, error)

    def _diverged(self, error: BitsDiffer) -> None:
        members = self.commitments.ledger.members
        self.report(diverged=StateDiverged(step=self.commitments.step, detail=str(error), worker_ids=members))

    def _state_lost(self) -> None:
        self.report(state_gone=self.commitments.ledger.generation)

    def report(self, *, urgent: bool = True, **changes: Any) -> None:
        """Change what the lighthouse knows of this worker."""
        if self._channel is not None:
            self._channel.report(urgent=urgent, **changes)


def _parameters(modules: Mapping[str, torch.nn.Module]) -> list[torch.nn.Parameter]:
    """All parameters, shared ones once, in the order of the modules."""
    found: dict[int, torch.nn.Parameter] = {}
    for module in modules.values():
        for param in module.parameters():
            found.setdefault(id(param), param)
    return list(found.values())


def _bitmap(flags: tuple[bool, ...]) -> bytes:
    bits = sum(1 << index for index, flag in enumerate(flags) if flag)
    return bits.to_bytes(-(-len(flags) // 8), "little")
