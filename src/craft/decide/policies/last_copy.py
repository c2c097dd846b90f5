"""Answer silent hosts with the last copy of the training state, and the end of a wait for one."""

from __future__ import annotations

from craft.decide.job.last_copy import awaiting, is_last_copy, may_restore
from craft.decide.job.state import Awaited, JobState
from craft.protocol.actions import AnyAction, DeclareHostLost, DeclareLost
from craft.protocol.events import AnyEvent, AwaitExpired, HostSilent, WorkerCaughtUp


class LastCopyPolicy:
    """Waits for a silent host with the last copy; gives it up once others have the state or a restore can begin."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, HostSilent):
            if not is_last_copy(state, _workers_of(state, event.host)):
                return (DeclareHostLost(host=event.host, reason=event.reason),)
            if any(each.host == event.host for each in state.awaited):
                return ()
            return (awaiting(state, event.reason, host=event.host),)
        if isinstance(event, WorkerCaughtUp):
            return tuple(_give_up(each) for each in state.awaited if not is_last_copy(state, _subjects(state, each)))
        if isinstance(event, AwaitExpired):
            subject = (event.worker_id, event.host)
            found = [each for each in state.awaited if (each.worker_id, each.host) == subject]
            return tuple(_give_up(each) for each in found if may_restore(state, each.host))
        return ()


def _subjects(state: JobState, each: Awaited) -> frozenset[str]:
    return frozenset({each.worker_id}) if each.worker_id is not None else _workers_of(state, each.host)


def _workers_of(state: JobState, host: str | None) -> frozenset[str]:
    return frozenset(view.member.worker_id for view in state.having("member") if view.member.host == host)


def _give_up(each: Awaited) -> AnyAction:
    reason = f"{each.what}, and it has not answered since"
    if each.worker_id is not None:
        return DeclareLost(worker_id=each.worker_id, source="watch", reason=reason)
    assert each.host is not None
    return DeclareHostLost(host=each.host, reason=reason)
