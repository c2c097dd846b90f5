"""The lighthouse's loop: event -> decide -> actions. It owns the only mutable state of the job.

In: events (``handle``) and reports of agents (``handle_report``). Out, for every event and in this order: a new
generation is made durable, the event and each action with its reason are journaled, agents get the new directive.
One thread calls it; time, timers and random numbers come from outside, so that a test can be the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import astuple

from craft.control.core.persistence import DurableStore, durable_of, history_of
from craft.control.core.report_checks import check
from craft.control.core.report_events import ReportEvents
from craft.control.replay.already_journaled import AlreadyJournaled
from craft.control.replay.faults import Fault, FaultBook
from craft.control.replay.timings import LOSSES, Timings
from craft.decide.job.apply import apply
from craft.decide.job.last_copy import is_last_copy
from craft.decide.job.observe import drains, observe
from craft.decide.job.positions import registered
from craft.decide.job.state import JobState
from craft.decide.policies.policy import Policy, decide
from craft.protocol import events
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
from craft.protocol.membership import Generation
from craft.protocol.messages import HostReport, WorkerReport

GRACE_S = 0.25
"""How long to wait after a generation breaks: a death would show within it."""
_LONGEST_GRACE_S = 4.0
"""The wait doubles with every generation that breaks in a row, up to this."""


ARRIVALS_S = 2.0
"""During a restore, how long to wait for the next worker if no agent reports one on the way: longer than an agent
takes to report a restart."""

_KEPT = (Reconfigure, Propose, Restore, Stop, Drain, WindDown, Preempt, TakeCheckpoint)
"""Actions whose outcome a restarted lighthouse must know."""


class JournalWriter(Protocol):
    """The part of a journal that the loop uses."""

    def write(self, kind: str, value: msgspec.Struct | dict[str, Any], **more: Any) -> None:
        """Append one line."""


class LoopHost(Protocol):
    """The process that the loop runs in: clock, timers, random numbers, dispatch."""

    def now(self) -> float:
        """Seconds since 1970."""

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``delay_s``, from the same thread."""

    def nonce(self) -> str:
        """Return a string that no other generation has in its name."""

    def tell(self, state: JobState) -> None:
        """Send the directive for ``state`` to all agents."""


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
        """Counts changes of the workers on the way during a restore."""
        self._journaled = journaled if journaled is not None else AlreadyJournaled()
        self.report_events = ReportEvents(lambda: self._state, self._journaled)
        self._await_deadline()
        for view in state.having("waiting", "member"):
            if view.leave_by is not None:
                self._await_leaving(view.member.worker_id, view.leave_by - host.now())
        if state.restoring and state.restoration is not None:
            # An earlier lighthouse began the restore and was waiting for workers.
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
        """All workers that this lighthouse or an earlier one heard of."""
        known = (view.member.worker_id for view in self._state.workers)
        return frozenset({*self._journaled.worker_ids, *known, *self.report_events.seen})

    @property
    def reports(self) -> dict[str, WorkerReport]:
        """The latest report of each worker."""
        return {worker_id: seen.report for worker_id, seen in self.report_events.seen.items()}

    def handle(self, event: events.AnyEvent) -> tuple[AnyAction, ...]:
        """Take in an event, carry out the answer, and return its actions and those that followed."""
        self._measure(event)
        before = self._state
        known = observe(before, event)
        actions = decide(self._policies, known, event)
        self._state = known
        if history_of(known) != history_of(before):
            # Before the journal: workers do not repeat to another lighthouse what is journaled.
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
        # Sent before the accounting: all workers wait for it.
        self._host.tell(self._state)
        if known.generation != before.generation:
            # Its members entered the upcoming generation, which was durable only as proposed.
            self._store.save(durable_of(self._state))
        self._account(before, event)
        return followed

    def handle_report(self, report: HostReport) -> None:
        """Turn what is new in an agent's report into events. On MalformedMessage nothing is changed."""
        check(report, self.report_events.index, self._state.replica_size)
        known = registered(self._state, report)
        if known is not self._state:
            self._state = known
            self._host.tell(known)
        if self._timings is not None:
            self._timings.reported(report, self._state, self._host.now())
        if any(each.host == report.host for each in self._state.awaited):
            self.handle(events.Answered(host=report.host))
        for event in self.report_events.of(report):
            self.handle(event)

    def _measure(self, event: events.AnyEvent) -> None:
        """Before the decision about a loss: put the measured times into the state and the journal."""
        if self._timings is None:
            return
        if isinstance(event, LOSSES) and self._state.generation is not None:
            self.handle(self._timings.figures(self.reports, self._state))
        self._timings.observed(event, self._state, self._host.now())

    def lose_worker(self, worker_id: str, reason: str, source: str) -> tuple[AnyAction, ...]:
        """Declare a worker lost on the word of another source than its agent."""
        lost = events.WorkerLost(
            worker_id=worker_id,
            reason=reason,
            source=source,
            time=self._host.now(),
            step=self.report_events.step_of(worker_id),
        )
        return self.handle(lost)

    def _drain(self, asked: RequestDrain) -> tuple[AnyAction, ...]:
        """Drain workers, unless they are draining already."""
        event = events.DrainRequested(
            worker_id=asked.worker_id, host=asked.host, reason=asked.reason, deadline_s=asked.deadline_s
        )
        return self.handle(event) if drains(self._state, event, self._host.now()) else ()

    def lose_host(self, host: str, reason: str) -> tuple[AnyAction, ...]:
        """Declare all workers of a host lost; do nothing if none is left."""
        self.report_events.silenced(host)
        actions: tuple[AnyAction, ...] = ()
        for worker_id in sorted(self.report_events.starting(host)):
            actions += self.lose_worker(worker_id, reason, "heartbeat")
        living = self.report_events.index.living(host)
        if living:
            steps = [step for each in living if (step := self.report_events.step_of(each)) is not None]
            lost = events.HostLost(host=host, reason=reason, time=self._host.now(), step=max(steps, default=None))
            actions += self.handle(lost)
        return actions

    def suspect_host(self, host: str, reason: str) -> None:
        """Declare a silent host lost, unless it has the last copy of the training state."""
        if is_last_copy(self._state, self.report_events.index.living(host)):
            self.handle(events.HostSilent(host=host, reason=reason))
        else:
            self.lose_host(host, reason)

    def _carry_out(self, action: AnyAction) -> None:
        changed = apply(self._state, action, self._host.nonce(), self._host.now())
        if isinstance(action, _KEPT):
            # Durable before it is sent: a restarted lighthouse must never reuse the number.
            self._store.save(durable_of(changed))
        made = None
        if isinstance(action, Reconfigure | Propose):
            made = changed.upcoming if isinstance(action, Propose) else changed.generation
        self._state = changed
        self._set_timer(action)
        if made is not None:
            self._journal.write("action", action, generation=made.number, name=made.name, **_slots(made))
        else:
            self._journal.write("action", action)

    def _set_timer(self, action: AnyAction) -> None:
        """Start the timer of an action that has one."""
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
        """Start the timer of a preemption, also of one begun by an earlier lighthouse."""
        if self._state.stopping is None and self._state.preempting is not None:
            deadline = self._state.preempting.deadline
            if deadline is not None:
                self._host.later(max(0.0, deadline - self._host.now()), lambda: self._end_preemption(deadline))

    def _end_hold(self, generation: int) -> None:
        if self._state.holding == generation:
            self.handle(events.HoldExpired(generation=generation))

    def _await_arrivals(self) -> None:
        """After a change during a restore: check later whether another worker is on the way."""
        self._arrivals += 1
        number = self._arrivals
        self._host.later(ARRIVALS_S, lambda: self._end_arrivals(number))

    def _end_arrivals(self, number: int) -> None:
        if number != self._arrivals or not self._state.restoring:
            return
        if self.report_events.any_coming:
            # Waits for as long as its agent reports it, within the limit of the restore.
            self._await_arrivals()
        elif self._state.is_enough(self._state.fitting((), self._state.spares)):
            self.handle(events.ArrivalsEnded(generation=self._state.holding))

    def _end_await(self, action: Await) -> None:
        if any((each.worker_id, each.host) == (action.worker_id, action.host) for each in self._state.awaited):
            self.handle(events.AwaitExpired(worker_id=action.worker_id, host=action.host))

    def _end_drain(self, worker_id: str) -> None:
        if self._state.recovering:
            # It may have left while no lighthouse ran: the agents are about to report that.
            self._await_leaving(worker_id, GRACE_S)
        elif self.report_events.index.lives(worker_id):
            self.handle(events.DrainExpired(worker_id=worker_id))

    def _end_preemption(self, deadline: float) -> None:
        wanted = self._state.preempting
        if self._state.stopping is None and wanted is not None and wanted.deadline == deadline:
            self.handle(events.PreemptExpired())

    def _look_again(self, generation: int) -> None:
        if generation in self.report_events.index.wanted and generation in self._state.broken:
            self.handle(events.GenerationStuck(generation=generation))

    def _account(self, before: JobState, event: events.AnyEvent) -> None:
        fault = self._faults.observed(before, self._state, event, self._host.now())
        if fault is not None:
            self._journal.write("outcome", fault)
        if isinstance(event, events.Recovered):
            restoration = self._state.restoration
            cost = self._faults.recovered(event, restoration.after if restoration is not None else 0)
            self._journal.write("outcome", cost)


def _slots(generation: Generation) -> dict[str, Any]:
    """Return what the journal says of the members' replicas and positions; nothing where every replica is one worker."""
    if generation.replica_size is msgspec.UNSET:
        return {}
    return {"slots": [list(astuple(each.slot)) for each in generation.members if each.slot is not msgspec.UNSET]}
