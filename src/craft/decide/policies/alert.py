"""Alerts of other systems."""

from __future__ import annotations

from craft.decide.job.observe import drains, observe
from craft.decide.job.state import JobState
from craft.decide.policies.abort import AbortPolicy
from craft.decide.policies.checkpoint import CheckpointPolicy
from craft.decide.policies.drain import DrainPolicy
from craft.decide.policies.policy import Policy
from craft.decide.policies.preempt import PreemptPolicy
from craft.decide.policies.stop import StopPolicy
from craft.protocol.actions import AnyAction, DeclareHostLost, DeclareLost
from craft.protocol.events import (
    AbortRequested,
    AlertFired,
    AnyEvent,
    CheckpointRequested,
    DrainRequested,
    PreemptRequested,
    StopRequested,
)


class AlertPolicy:
    """Answers an alert with what its rule says, as if a person had ordered it."""

    def __init__(self) -> None:
        self._orders: dict[type, Policy] = {
            DrainRequested: DrainPolicy(),
            StopRequested: StopPolicy(),
            PreemptRequested: PreemptPolicy(),
            CheckpointRequested: CheckpointPolicy(),
            AbortRequested: AbortPolicy(),
        }

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, AlertFired):
            return ()
        if event.answer == "fail":
            return self._lost(state, event)
        order = self._order(state, event)
        return () if order is None else self._orders[type(order)].decide(observe(state, order), order)

    def _order(self, state: JobState, event: AlertFired) -> AnyEvent | None:
        """What a person would have ordered; None if that is under way already, or nothing is to be done."""
        if event.answer == "drain":
            drain = DrainRequested(
                worker_id=event.worker_id, host=event.host, reason=event.reason, deadline_s=event.deadline_s
            )
            return drain if drains(state, drain, event.time) else None
        if event.answer == "preempt":
            deadline = None if event.deadline_s is None else event.time + event.deadline_s
            return PreemptRequested(reason=event.reason, deadline=deadline)
        if event.answer == "abort":
            return AbortRequested(reason=event.reason)
        if state.ending:
            return None
        if event.answer == "stop":
            return StopRequested(reason=event.reason)
        return CheckpointRequested(reason=event.reason) if event.answer == "checkpoint" else None

    def _lost(self, state: JobState, event: AlertFired) -> tuple[AnyAction, ...]:
        living = state.having("waiting", "member")
        if any(view.member.worker_id == event.worker_id for view in living):
            assert event.worker_id is not None
            return (DeclareLost(worker_id=event.worker_id, source="alert", reason=event.reason),)
        if any(view.member.host == event.host for view in living):
            assert event.host is not None
            return (DeclareHostLost(host=event.host, reason=event.reason),)
        return ()
