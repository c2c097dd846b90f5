"""The first generation."""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.decide.policies.policy import EXIT_GIVEN_UP, too_few
from craft.protocol.actions import AnyAction, Reconfigure, Stop
from craft.protocol.events import AnyEvent, HostLost, WorkerFailed, WorkerFinished, WorkerJoined, WorkerLeft, WorkerLost
from craft.protocol.membership import Member


class FormPolicy:
    """Makes the first generation, once every expected worker has joined or is known to be lost."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.generation is not None or state.restoring:
            return ()
        if not isinstance(event, WorkerJoined | WorkerLost | WorkerFailed | WorkerFinished | WorkerLeft | HostLost):
            return ()
        if len(state.having("waiting")) < state.slots - state.absent:
            return ()
        # Spares are there for those who do not come at all, not for those who take longer.
        if sum(not view.member.late for view in state.having("waiting")) < state.slots - state.absent:
            return ()
        waiting = in_order(state)
        if len(waiting) < state.min_workers:
            return (Stop(reason=too_few(len(waiting), state.min_workers), exit_code=EXIT_GIVEN_UP),)
        chosen = waiting[: state.slots]
        reason = f"all {len(chosen)} workers joined" if len(chosen) > 1 else "the only worker joined"
        return (Reconfigure(members=chosen, reason=reason),)


def in_order(state: JobState) -> tuple[str, ...]:
    """Those who wait, as they get their ranks: by their names, not as they came, so that ranks are what RANK says.

    Those who came late are the last.
    """
    return tuple(member.worker_id for member in sorted((view.member for view in state.having("waiting")), key=_by_name))


def _by_name(member: Member) -> tuple[bool, str, int, str]:
    """w10 comes after w9."""
    return member.late, member.host, len(member.worker_id), member.worker_id
