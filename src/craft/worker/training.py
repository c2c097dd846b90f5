"""One call of ``job.steps``: everything that the loop needs, put together, and what happens around each step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from craft.decide import ledger as books
from craft.decide.technique import Chosen, Moment
from craft.decide.techniques import GpuHealth, Stragglers
from craft.protocol.activity import Phase
from craft.protocol.errors import ConfigError, GroupError
from craft.protocol.events import StopRequested
from craft.protocol.membership import Settlement
from craft.snapshots.device import hold_back
from craft.snapshots.state import Leaf, RotatingDigest, digest, module_leaves, registered_leaves
from craft.worker.account import Account
from craft.worker.buffers import Buffers
from craft.worker.calls import Calls
from craft.worker.chronicle import Committed
from craft.worker.course import STATE_IS_BUILT, Course
from craft.worker.exchange import ExchangeThread
from craft.worker.flight import PROBE, Flight
from craft.worker.gather import gather
from craft.worker.gradients import Gradients
from craft.worker.heal import Healing
from craft.worker.health import GpuWatch, watch_gpu
from craft.worker.joining import Joining
from craft.worker.layout import Layout, bitmap, parameters_of, trainable_of
from craft.worker.pacing import Pacing
from craft.worker.parts import Parts
from craft.worker.passive import InWorker, Passive, hooks_of
from craft.worker.points import reach
from craft.worker.scalars import shown
from craft.worker.start import check_conditions, make_equal
from craft.worker.structure import Structure

if TYPE_CHECKING:
    from craft.worker.attempts import StepAttempt
    from craft.worker.follow import Result
    from craft.worker.steps import Step

logger = logging.getLogger(__name__)


class Training:
    """Owned by the main thread."""

    def __init__(self, parts: Parts) -> None:
        settings, commitments, voice, techniques = parts.settings, parts.commitments, parts.voice, parts.techniques
        self.settings = settings
        self.commitments = commitments
        self.activity = parts.activity
        self.source = parts.source
        self.seed = parts.seed
        self.current: Step | StepAttempt | None = None
        """The step that the script is in, or was in last."""
        self.stop_reason: str | None = None
        self.finished = False
        """Whether whoever drives the loop has ended it, on every worker after the same step."""
        self._meeting = parts.meeting
        self._voice = voice
        self._modules = parts.modules
        self._registered = parts.registered
        self._conditions = parts.conditions
        self._own_loop = parts.own_loop
        exchanged = [] if parts.own_loop else list(parts.modules.values())
        self._structure = Structure({} if parts.own_loop else parts.modules)
        self._params = parameters_of(exchanged)
        self._buffers = Buffers(exchanged)
        self._exchange = ExchangeThread(voice.broke)
        self._digest = RotatingDigest(settings.digest_bytes)
        self._account = Account(settings.run_dir, settings.worker_id, voice.note, parts.source.samples, voice.unwritten)
        self.course = Course(parts)
        self._pacing = Pacing(techniques, parts.activity, lambda: commitments.ledger, voice.note, voice.emit)
        own = {**self.course.hooks, Stragglers.name: self._pacing}
        self._gpu = self._watch_gpu(techniques)
        self.passive = Passive(hooks_of(techniques, own, settings, voice), voice.note, self._moment)
        key = settings.state_key_bytes
        self.healing = Healing(
            parts.donor, key, commitments, parts.modules, parts.registered, self.course, parts.reserve
        )
        self.calls = Calls(commitments, parts.donor, key, self._regroup_between_steps)
        self._joining: Joining | None = None
        self._expected: tuple[int, tuple[int, ...]] | None = None
        self._ended = False
        self.over = False
        """Whether the loop has come to its end."""
        commitments.record = self._account.entered
        commitments.trainable = lambda: bitmap(trainable_of(self._params))
        self.flight = self._new_flight()
        self.flight.probe_wanted = self.flight.compares

    def _new_flight(self) -> Flight:
        layout = Layout(self._params, self.bucket_bytes)
        flight = Flight(
            self.commitments,
            self._exchange,
            Gradients(layout, hold=self.settings.hold),
            self._buffers,
            self._digest,
            self.leaves,
            self.source.size_of,
            self.settled,
            self._voice,
            self.course.numbers,
            self._word,
        )
        flight.compares = self.settings.check_bits and not self._own_loop
        return flight

    def _word(self, step: int) -> dict[str, Any]:
        """What else goes into the word of ``step``."""
        return {**self.course.word(step), "busy_us": self._pacing.busy_us(self.flight.num_computed)}

    @property
    def applied(self) -> int:
        """The step that the script is in: for a joiner that catches up, behind that of the others."""
        return self.course.applied

    @property
    def total_steps(self) -> int | None:
        return self.source.total_steps

    @property
    def bucket_bytes(self) -> int:
        return int(self.settings.bucket_mb * (1 << 20))

    def _moment(self, step: int | None = None, **more: Any) -> Moment:
        ledger = self.commitments.ledger
        return Moment(
            step=self.applied if step is None else step,
            branch=ledger.branch,
            generation=ledger.generation or 0,
            members=ledger.members,
            behind=self.behind,
            **more,
        )

    def leaves(self) -> list[Leaf]:
        """The whole training state."""
        return [*module_leaves(self._modules), *registered_leaves(self._registered)]

    def buffers_now(self) -> Buffers:
        """Those of all modules, also of registered ones, as they are now."""
        items = (*self._modules.values(), *self._registered.values())
        return Buffers([each for each in items if isinstance(each, torch.nn.Module)])

    def start(self) -> None:
        """Meet the others, and make sure that all begin from the same state under the same conditions."""
        self.activity.now(Phase.JOINING, 0)
        if self.settings.late:
            self._voice.report(joined=True)
        settlement = self._regroup()
        # A loss meanwhile leads to another round, unless somebody has come through: then all have, and may be on their way.
        while not self.commitments.started:
            try:
                self._compare()
                self.commitments.started = True
            except GroupError as error:
                self.commitments.broke(error)
                self.commitments.await_move()
                settlement = self._regroup()
        reach("started", self.commitments.step)
        if self.commitments.ledger.whole:
            self.healing.needs_nothing()
            self.course.applied = self.commitments.step
            self.settled(settlement, level=True)
        else:
            self._join(settlement)
        self._voice.report(total_steps=self.total_steps)
        self._account.begin()

    def _regroup(self) -> Settlement:
        settlement = self.commitments.regroup(self.source.size_of)
        self._follow()
        return settlement

    def _follow(self) -> None:
        if self.course.follow():
            self._voice.report(total_steps=self.total_steps)
            self._digest.restart(self.applied)
            self._ended = False

    def _compare(self) -> None:
        self.course.begin()
        group, members = self.commitments.group, self.commitments.ledger.members
        check_conditions(group, members, self._conditions)
        self._follow()
        unequal = make_equal(group, members, self.leaves())
        if unequal is not None:
            self._voice.unequal(unequal)

    def _join(self, settlement: Settlement) -> None:
        """The others are on their way."""
        self._voice.report(urgent=False, behind=True)
        self._joining = Joining(
            self.commitments,
            self.healing,
            self._voice,
            self._params,
            self._buffers,
            self.source.size_of,
            self.bucket_bytes,
            self._own_loop,
        )
        self.course.applied, progress = self._joining.take_state(settlement)
        self.healing.measure()
        self.course.take(progress)
        self.flight.probe_wanted = False

    def wants_more(self) -> bool:
        """Whether there is another step; what is due at the boundary before it is done first."""
        self._structure.check()
        self.course.at_boundary(self.behind, lambda: self.settled(self._regroup(), level=True))
        if self._ended:
            return False
        self._meeting.at(self.applied)
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
        if self._joining is not None:
            self._buffers.begin()
            return
        self.healing.give()
        self.flight.begin()

    def next_microbatch(self) -> int | None:
        """What the inner loop computes next; the data source is told what to expect."""
        if self._joining is not None:
            if self._joining.warms_up():
                return PROBE
            if self._joining.catches_up and self._replay(self._joining):
                return None
            self._keep_pace()
        self.activity.now(Phase.EXCHANGING, self.applied)
        self.flight.stop_reason = self.stop_reason or self._meeting.winding_down
        if not self.commitments.ledger.pending:
            self.passive.reach("before_commit")
        microbatch = self.flight.next_microbatch()
        ledger = self.commitments.ledger
        if microbatch is not None and self._expected != (self.commitments.step, ledger.owners):
            self._expected = (self.commitments.step, ledger.owners)
            self.source.expect(self.commitments.step, ledger.share)
        return microbatch

    def take_up(self) -> Result | None:
        """A loop of the script's own begins a step: what to replay of it, or None if this worker takes part in it."""
        if self._joining is not None:
            self.activity.now(Phase.EXCHANGING, self.applied)
            if self._joining.catches_up and (result := self._joining.next()) is not None:
                return result
            self._keep_pace()
        return None

    def conclude(self) -> bool:
        """The body of such a step is over: whether it is committed now."""
        self.activity.now(Phase.EXCHANGING, self.applied)
        self.flight.stop_reason = self.stop_reason or self._meeting.winding_down
        self.passive.reach("before_commit")
        return self.flight.conclude()

    def _replay(self, joining: Joining) -> bool:
        """Hand the next queued result to the script; False if there is none any more."""
        self.activity.now(Phase.EXCHANGING, self.applied)
        result = joining.next()
        if result is not None:
            self.replay(result)
        return result is not None

    def replay(self, result: Result) -> None:
        """Hand the result of a step to the script that was committed without it."""
        self.flight.replay(result)
        if result.able:
            # All know by it that this worker has caught up, and do what comes next with it.
            self._caught_up(self.applied + 1)

    def _keep_pace(self) -> None:
        """A joiner has caught up, which the others do not know yet: with the word of this step it tells them."""
        self._caught_up(self.applied)
        # Nobody who kept pace may be left: then those who join wait for what is here. Warming up has changed the buffers.
        self._buffers.restore()
        self.healing.give()
        # What was replayed last may have said that all enter a generation at this boundary.
        self.flight.keep_pace()

    def _caught_up(self, step: int) -> None:
        """From ``step`` on this worker takes part in the exchange itself."""
        self._joining = None
        self._voice.report(urgent=False, behind=False)
        self.commitments.ledger = books.keeps_pace(self.commitments.ledger)
        self._digest.restart(self.applied + 1)
        logger.info("keeps pace with the others from step %d on", step)

    def committed(self, number: int) -> dict[str, float]:
        """A step was committed: write it down and report it. Returns its metrics."""
        flight, ledger = self.flight, self.commitments.ledger
        combined = flight.combined
        assert combined is not None and combined.step == number == self.applied
        if combined.empty:
            raise ConfigError(
                f"no stream has data from step {number} on: there is nothing left to train on"
                if number
                else "the stream ended before it gave any data: there is nothing to train on"
            )
        # The script's update comes next, and the state before it may still be on its way to a joiner or a checkpoint.
        hold_back()
        metrics = shown(combined.metrics)
        self._account.committed(
            Committed(
                step=number,
                branch=ledger.branch,
                generation=flight.generation,
                members=flight.members,
                plan=flight.plan,
                metrics=metrics,
            )
        )
        self.activity.committed()
        self.activity.now(Phase.UPDATING, number)
        flight.probe_wanted = False
        self.healing.committed(computed=ledger.worker_id in flight.plan)
        if number == STATE_IS_BUILT and self._voice.is_heard:
            self._voice.report(urgent=False, carried_bytes=self.healing.measure())
        self._ended = combined.ended or combined.stop is not None
        assert flight.under is not None
        self.course.applied = number + 1
        self.passive.reach("after_commit", step=number, metrics=metrics, word=combined, under=flight.under)
        self.course.prepare(number, flight.under)
        if combined.stop is not None:
            self._voice.emit(StopRequested(reason=combined.stop))
        times = self._pacing.committed(flight.waited_s)
        self._voice.report(urgent=False, step=number + 1, metrics=metrics, step_s=self._account.step_s, times=times)
        return metrics

    # Between the steps.

    @property
    def behind(self) -> bool:
        """Whether this worker catches up: it takes no part in what the others do between the steps."""
        return self._joining is not None

    def is_followed(self) -> bool:
        """Whether a joiner's thread follows generations in the main thread's stead."""
        return self._joining is not None and self._joining.is_followed

    def _regroup_between_steps(self) -> None:
        # The update of the step that was committed last may be half done: the state is nobody's yet.
        self.settled(self._regroup(), level=False)

    def end(self) -> None:
        """Every step is committed here; leave only when it is everywhere, as far as the others are still there."""
        if self._joining is not None:
            # It has nothing more to take: the last results are replayed.
            assert self._joining.next() is None
            self._joining = None
        self.over = True
        self.activity.now(Phase.ENDING)
        self.healing.give()
        while True:
            try:
                # Once this returns, everybody has come here: nobody needs anything from this worker any more.
                gather(self.commitments.group, b"")
                self.course.end()
                break
            except GroupError as error:
                self.commitments.broke(error)
                self.commitments.await_move()
                self.settled(self._regroup(), level=True)
        self._account.complete()
        self._voice.report(complete=True, step=self.commitments.step, digest=digest(self.leaves()))

    def _watch_gpu(self, techniques: Chosen) -> GpuWatch | None:
        technique = techniques.get(GpuHealth)
        if technique is None:
            return None
        return watch_gpu(technique.settings, InWorker(technique.name, self.settings, self._voice))

    def close(self) -> None:
        self._structure.close()
        self.passive.close()
        if self._gpu is not None:
            self._gpu.close()
        self.course.close()
        self.flight.gradients.detach()
        self._meeting.close()
        self._exchange.stop()
        self.source.close()

    def settled(self, settlement: Settlement, level: bool) -> None:
        """A new generation is settled: tell the lighthouse, those who join, and the script if it wants to know.

        ``level``: whether the state here is that of the step that goes on; if not, the script's update comes first.
        """
        if self.commitments.entered is not None:
            self._account.settled(self.commitments.entered)
        # Whether it was in a step or still before its first one: from here on all look at the same slices.
        self._digest.restart(settlement.level + 1)
        self.healing.settled(settlement)
        self.passive.reach("generation_change", lost=self.commitments.lost)
        if level:
            self.healing.give()
        self._voice.entered(settlement, self.commitments.ledger.generation, self.commitments.lost)
