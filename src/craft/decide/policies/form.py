"""The first generation."""

from __future__ import annotations

from craft.decide.membership import JobState
from craft.decide.policies.policy import EXIT_GIVEN_UP, too_few
from craft.protocol.actions import AnyAction, Reconfigure, Stop
from craft.protocol.events import AnyEvent, HostLost, WorkerFailed, WorkerFinished, WorkerJoined, WorkerLost
from craft.protocol.membership import Member


class FormPolicy:
    """Makes the first generation, once every expected worker has joined or is known to be lost."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is not None or not isinstance(
            event, WorkerJoined | WorkerLost | WorkerFailed | WorkerFinished | HostLost
        ):
            return ()
        if len(state.having("waiting")) < state.slots - state.absent:
            return ()
        # In the order of their names, not of their coming: ranks are then what RANK says in a worker's environment.
        # Spares come last: they are there for those who do not come at all, not for those who take longer.
        members = sorted((view.member for view in state.having("waiting")), key=_by_name)
        if sum(not member.late for member in members) < state.slots - state.absent:
            return ()
        waiting = tuple(member.worker_id for member in members)
        if len(waiting) < state.min_workers:
            return (Stop(reason=too_few(len(waiting), state.min_workers), exit_code=EXIT_GIVEN_UP),)
        chosen = waiting[: state.slots]
        return (Reconfigure(members=chosen, reason=f"all {len(chosen)} workers joined"),)


def _by_name(member: Member) -> tuple[bool, str, int, str]:
    """w10 comes after w9."""
    return member.late, member.host, len(member.worker_id), member.worker_id
