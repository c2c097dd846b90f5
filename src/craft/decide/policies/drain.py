"""Workers that are to leave."""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.decide.policies.join import proposed
from craft.protocol.actions import AnyAction, DeclareLost, Drain, Release
from craft.protocol.events import AnyEvent, DrainExpired, DrainRequested


class DrainPolicy:
    """Lets workers leave at a step boundary; those who are still there at their deadline are lost."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, DrainExpired):
            view = state.view(event.worker_id)
            if view is None or view.draining is None or view.standing not in ("waiting", "member"):
                return ()
            reason = f"was to leave ({view.draining}) and is still there at its deadline"
            return (DeclareLost(worker_id=event.worker_id, source="drain", reason=reason),)
        if not isinstance(event, DrainRequested):
            return ()
        about = [
            view
            for view in state.having("waiting", "member")
            if view.member.worker_id == event.worker_id or view.member.host == event.host
        ]
        # A spare has nothing that anybody needs: it can go at once.
        spares = [view.member.worker_id for view in about if view.standing == "waiting"]
        members = [view.member.worker_id for view in about if view.standing == "member"]
        ends = [
            Release(worker_id=worker_id, reason=f"a spare that is to leave: {event.reason}") for worker_id in spares
        ]
        drains = [Drain(worker_id=worker_id, deadline_s=event.deadline_s, reason=event.reason) for worker_id in members]
        return (*ends, *drains, *proposed(state))
