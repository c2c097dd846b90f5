"""Changes of membership that wait for a step boundary: who joins, who leaves."""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.decide.policies.policy import names
from craft.decide.step.topology import seated
from craft.protocol.actions import AnyAction, Propose
from craft.protocol.events import AnyEvent, DrainRequested, GenerationEntered, WorkerJoined


class JoinPolicy:
    """Proposes a generation with whoever waits for a free slot, and without whoever is to leave."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, WorkerJoined | GenerationEntered | DrainRequested):
            return ()
        return proposed(state)


def proposed(state: JobState) -> tuple[AnyAction, ...]:
    """The generation that is wanted at the next step boundary, if it is another one than the current."""
    if state.generation is None or state.recovering or state.holding or state.ending:
        return ()
    if state.upcoming is not None:
        # Its members may be entering it just now; were it replaced, nobody would know under what they act.
        return ()
    if not state.having("waiting") and not state.roster.has_leaving_members():
        # The usual case, and quickly seen: thousands of workers enter a generation within moments.
        return ()
    if any(view.entered < state.generation.number for view in state.having("member")):
        # A generation is prepared only from one that everybody is in; GenerationEntered asks again.
        return ()
    staying = state.staying
    kept = frozenset(staying)
    leaving = tuple(worker_id for worker_id in state.members if worker_id not in kept)
    # Nobody joins where it was found to cost more than it saves.
    joining = state.spares[: max(0, state.slots - len(staying))] if state.replacing else ()
    if not staying:
        # Somebody who has the state must stay, at least until somebody else has it, too.
        staying, leaving = state.members, ()
    wanted = seated(staying, joining, state.host_of)
    if not (joining or leaving) or (leaving and len(wanted) < state.min_workers):
        return ()
    parts = [f"{names(joining)} {'joins' if len(joining) == 1 else 'join'}"] if joining else []
    parts += [f"{names(leaving)} {'leaves' if len(leaving) == 1 else 'leave'}"] if leaving else []
    return (Propose(members=wanted, reason=f"{' and '.join(parts)} at the next step boundary"),)
