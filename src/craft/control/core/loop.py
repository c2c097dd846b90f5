"""The lighthouse's loop: event -> decide -> actions. The only mutable state of the job.

In: events (``handle``) and reports of agents (``handle_report``). Out, for every event and in this order: a new
generation is made durable, the journal has the event and each action with its reason, everybody is told.
One thread calls it; time, timers and chance come in from outside, so that a test can be the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from craft.control.core.persistence import DurableStore, durable_of, history_of
from craft.control.core.report_events import ReportEvents, check
from craft.control.replay.already_journaled import AlreadyJournaled
from craft.control.replay.faults import Fault, FaultBook
from craft.control.replay.timings import LOSSES, Timings
from craft.decide.job.apply import apply
from craft.decide.job.last_copy import is_last_copy
from craft.decide.job.observe import drains, observe
from craft.decide.job.state import JobState
from craft.decide.policies import Policy, decide
from craft.protocol.actions import (
    AnyAction,
    Await,
    DeclareHostLost,
    DeclareLost,
    Drain,
    Hold,
    Preempt,
    Propose,
    Reconfigure,
    RequestDrain,
    Restore,
    Stop,
    TakeCheckpoint,
    Watch,
    WindDown,
)
from craft.protocol.events import (
    Answered,
    AnyEvent,
    ArrivalsEnded,
    AwaitExpired,
    DrainExpired,
    DrainRequested,
    GenerationStuck,
    HoldExpired,
    HostLost,
    HostSilent,
    PreemptExpired,
    Recovered,
    WorkerLost,
)
from craft.protocol.messages import HostReport, WorkerReport

GRACE_S = 0.25
"""How long a broken generation is left alone: within it, a death would have shown."""
_LONGEST_GRACE_S = 4.0
"""The more generations break in a row, the longer: what is wrong may take its time to show."""


ARRIVALS_S = 2.0
"""How long the next worker of a job that begins again is waited for where no agent says that one is on its way: longer than it
takes an agent to say so after a loss."""

_KEPT = (Reconfigure, Propose, Restore, Stop, Drain, WindDown, Preempt, TakeCheckpoint)
"""Actions whose outcome a restarted lighthouse must know."""


class JournalWriter(Protocol):
    """What the loop needs of a journal."""

    def write(self, kind: str, value: msgspec.Struct | dict[str, Any], **more: Any) -> None:
        """Append one line."""


class LoopHost(Protocol):
    """What the loop needs of the process it runs in."""

    def now(self) -> float:
        """Seconds since 1970."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``delay_s``, from the same thread."""

    def nonce(self) -> str:
        """A string that no other generation has in its name."""

    def tell(self, state: JobState) -> None:
        """Let everybody know what is now wanted."""


class Loop:
    """Owns the state of the job."""

    def __init__(
        self,
        state: JobState,
        *,
        policies: Sequence[Policy],
        store: DurableStore,
        journal: JournalWriter,
        host: LoopHost,
        grace_s: float = GRACE_S,
        faults: FaultBook | None = None,
        journaled: AlreadyJournaled | None = None,
        timings: Timings | None = None,
    ) -> None:
        """``faults`` and ``journaled`` are from earlier lighthouses; ``timings``: given if answers are chosen by cost."""
        self._state = state
        self._policies = policies
        self._store = store
        self._journal = journal
        self._host = host
        self._grace_s = grace_s
        self._faults = faults if faults is not None else FaultBook()
        self._timings = timings
        self._watched: set[int] = set()
        self._arrivals = 0
        """Counts what changes who is on the way to a job that begins again."""
        self._journaled = journaled if journaled is not None else AlreadyJournaled()
        self.report_events = ReportEvents(lambda: self._state, self._journaled)
        self._await_deadline()
        for view in state.having("waiting", "member"):
            if view.leave_by is not None:
                self._await_leaving(view.member.worker_id, view.leave_by - host.now())
        if state.restoring and state.restoration is not None:
            # An earlier lighthouse let the job begin again, and was waiting for its workers.
            host.later(state.restoration.limit_s, lambda: self._end_hold(state.holding))
            self._await_arrivals()

    @property
    def state(self) -> JobState:
        return self._state

    @property
    def faults(self) -> Sequence[Fault]:
        return self._faults.faults

    @property
    def worker_ids(self) -> frozenset[str]:
        """All workers that this lighthouse or an earlier one ever heard of."""
        known = (view.member.worker_id for view in self._state.workers)
        return frozenset({*self._journaled.worker_ids, *known, *self.report_events.seen})

    @property
    def reports(self) -> dict[str, WorkerReport]:
        """The latest report of each worker, for whoever wants to show them."""
        return {worker_id: seen.report for worker_id, seen in self.report_events.seen.items()}

    def handle(self, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Take an event in, do what is decided about it, and return that, with what followed from it."""
        self._measure(event)
        before = self._state
        known = observe(before, event)
        actions = decide(self._policies, known, event)
        self._state = known
        if history_of(known) != history_of(before):
            # Before it is in the journal: workers do not repeat to another lighthouse what is there.
            self._store.save(durable_of(known))
        if event not in self._journaled:
            self._journal.write("event", event)
        for action in actions:
            self._carry_out(action)
        followed = actions
        for action in actions:
            if isinstance(action, DeclareLost):
                followed += self.lose_worker(action.worker_id, action.reason, action.source)
            elif isinstance(action, DeclareHostLost):
                followed += self.lose_host(action.host, action.reason)
            elif isinstance(action, RequestDrain):
                followed += self._drain(action)
        if self._state.restoring:
            self._await_arrivals()
        # Told before the books are kept: every moment here is a moment in which all workers wait.
        self._host.tell(self._state)
        if known.generation != before.generation:
            # Its members entered what was upcoming: durable since it was proposed, but not yet as what runs.
            self._store.save(durable_of(self._state))
        self._account(before, event)
        return followed

    def handle_report(self, report: HostReport) -> None:
        """Take in what an agent reports; what is new in it becomes events. MalformedMessage: nothing was changed."""
        check(report, self.report_events.index)
        if self._timings is not None:
            self._timings.reported(report, self._state, self._host.now())
        if any(each.host == report.host for each in self._state.awaited):
            self.handle(Answered(host=report.host))
        for event in self.report_events.events(report):
            self.handle(event)

    def _measure(self, event: AnyEvent) -> None:
        """Before it is decided about a loss: have the figures in the state, and in the journal."""
        if self._timings is None:
            return
        if isinstance(event, LOSSES) and self._state.generation is not None:
            self.handle(self._timings.figures(self.reports, self._state))
        self._timings.observed(event, self._state, self._host.now())

    def lose_worker(self, worker_id: str, reason: str, source: str) -> tuple[AnyAction, ...]:
        """Go on without a worker, because somebody other than its agent says so."""
        lost = WorkerLost(
            worker_id=worker_id,
            reason=reason,
            source=source,
            time=self._host.now(),
            step=self.report_events.step_of(worker_id),
        )
        return self.handle(lost)

    def _drain(self, asked: RequestDrain) -> tuple[AnyAction, ...]:
        """Let workers leave, unless they are about to already."""
        event = DrainRequested(
            worker_id=asked.worker_id, host=asked.host, reason=asked.reason, deadline_s=asked.deadline_s
        )
        return self.handle(event) if drains(self._state, event, self._host.now()) else ()

    def lose_host(self, host: str, reason: str) -> tuple[AnyAction, ...]:
        """Go on without all workers of a host; does nothing if none of them is left."""
        self.report_events.silenced(host)
        actions: tuple[AnyAction, ...] = ()
        for worker_id in sorted(self.report_events.starting(host)):
            actions += self.lose_worker(worker_id, reason, "heartbeat")
        living = self.report_events.index.living(host)
        if living:
            steps = [step for each in living if (step := self.report_events.step_of(each)) is not None]
            lost = HostLost(host=host, reason=reason, time=self._host.now(), step=max(steps, default=None))
            actions += self.handle(lost)
        return actions

    def suspect_host(self, host: str, reason: str) -> None:
        """A host is silent: go on without its workers, unless only they have the training state."""
        if is_last_copy(self._state, self.report_events.index.living(host)):
            self.handle(HostSilent(host=host, reason=reason))
        else:
            self.lose_host(host, reason)

    def _carry_out(self, action: AnyAction) -> None:
        changed = apply(self._state, action, self._host.nonce(), self._host.now())
        if isinstance(action, _KEPT):
            # Durable before anyone is told: a restarted lighthouse must never use the number again.
            self._store.save(durable_of(changed))
        made = None
        if isinstance(action, Reconfigure | Propose):
            made = changed.upcoming if isinstance(action, Propose) else changed.generation
        self._state = changed
        self._set_timer(action)
        if made is not None:
            self._journal.write("action", action, generation=made.number, name=made.name)
        else:
            self._journal.write("action", action)

    def _set_timer(self, action: AnyAction) -> None:
        """Some actions ask to be reminded."""
        if isinstance(action, Watch) and action.generation not in self._watched:
            self._watched.add(action.generation)
            grace_s = min(_LONGEST_GRACE_S, self._grace_s * 2 ** (action.times - 1))
            self._host.later(grace_s, lambda: self._look_again(action.generation))
        elif isinstance(action, Hold | Restore):
            held = self._state.holding
            self._host.later(action.limit_s, lambda: self._end_hold(held))
        elif isinstance(action, Await) and action.limit_s is not None:
            self._host.later(action.limit_s, lambda: self._end_await(action))
        elif isinstance(action, Drain) and action.deadline_s is not None:
            self._await_leaving(action.worker_id, action.deadline_s)
        elif isinstance(action, Preempt):
            self._await_deadline()

    def _await_leaving(self, worker_id: str, limit_s: float) -> None:
        self._host.later(max(0.0, limit_s), lambda: self._end_drain(worker_id))

    def _await_deadline(self) -> None:
        """Of a job that makes room; also of one that was told so by an earlier lighthouse."""
        if self._state.stopping is None and self._state.preempting is not None:
            deadline = self._state.preempting.deadline
            if deadline is not None:
                self._host.later(max(0.0, deadline - self._host.now()), lambda: self._end_preemption(deadline))

    def _end_hold(self, generation: int) -> None:
        if self._state.holding == generation:
            self.handle(HoldExpired(generation=generation))

    def _await_arrivals(self) -> None:
        """Something has changed in a job that begins again: look after a while whether anybody else is on the way."""
        self._arrivals += 1
        number = self._arrivals
        self._host.later(ARRIVALS_S, lambda: self._end_arrivals(number))

    def _end_arrivals(self, number: int) -> None:
        if number != self._arrivals or not self._state.restoring:
            return
        if self.report_events.any_coming:
            # Waited for as long as its agent says so, and the limit of the restore allows.
            self._await_arrivals()
        elif len(self._state.spares) >= self._state.min_workers:
            self.handle(ArrivalsEnded(generation=self._state.holding))

    def _end_await(self, action: Await) -> None:
        if any((each.worker_id, each.host) == (action.worker_id, action.host) for each in self._state.awaited):
            self.handle(AwaitExpired(worker_id=action.worker_id, host=action.host))

    def _end_drain(self, worker_id: str) -> None:
        if self._state.recovering:
            # It may have left while no lighthouse was there: the agents are about to say so.
            self._await_leaving(worker_id, GRACE_S)
        elif self.report_events.index.lives(worker_id):
            self.handle(DrainExpired(worker_id=worker_id))

    def _end_preemption(self, deadline: float) -> None:
        wanted = self._state.preempting
        if self._state.stopping is None and wanted is not None and wanted.deadline == deadline:
            self.handle(PreemptExpired())

    def _look_again(self, generation: int) -> None:
        if generation in self.report_events.index.wanted and generation in self._state.broken:
            self.handle(GenerationStuck(generation=generation))

    def _account(self, before: JobState, event: AnyEvent) -> None:
        fault = self._faults.observed(before, self._state, event, self._host.now())
        if fault is not None:
            self._journal.write("outcome", fault)
        if isinstance(event, Recovered):
            restoration = self._state.restoration
            cost = self._faults.recovered(event, restoration.after if restoration is not None else 0)
            self._journal.write("outcome", cost)
