"""Answer alerts of other systems."""

from __future__ import annotations

from collections.abc import Mapping

from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.decide.policies.policy import Policy
from craft.decide.policies.preempt import PreemptPolicy
from craft.decide.policies.requests import AbortPolicy, CheckpointPolicy, drain
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

_POLICIES: Mapping[type, Policy] = {
    StopRequested: StopPolicy(),
    PreemptRequested: PreemptPolicy(),
    CheckpointRequested: CheckpointPolicy(),
    AbortRequested: AbortPolicy(),
}


class AlertPolicy:
    """Answers an alert with what its rule says, as if a person had requested it."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, AlertFired):
            return ()
        if event.answer == "fail":
            return self._lost(state, event)
        if event.answer == "drain":
            request = DrainRequested(
                worker_id=event.worker_id, host=event.host, reason=event.reason, deadline_s=event.deadline_s
            )
            return drain(state, request, event.time)
        equivalent = self._request(state, event)
        if equivalent is None:
            return ()
        return _POLICIES[type(equivalent)].decide(observe(state, equivalent), equivalent)

    def _request(self, state: JobState, event: AlertFired) -> AnyEvent | None:
        """Return what a person would have requested; None if there is nothing to do."""
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
