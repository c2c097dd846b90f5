"""Answer preemption: checkpoint, leave, end the job."""

from __future__ import annotations

from msgspec.structs import replace

from craft.decide.job.observe import preempts
from craft.decide.job.state import JobState
from craft.decide.policies.policy import EXIT_PREEMPTED
from craft.protocol.actions import AnyAction, Preempt, Reconfigure, Release, Stop
from craft.protocol.events import (
    AnyEvent,
    HostLost,
    PreemptExpired,
    PreemptRequested,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from craft.protocol.messages import PreemptionOrder


class PreemptPolicy:
    """Makes every worker take a checkpoint and leave; the job ends when all have, or at the deadline.

    A loss in the meantime is answered as always: the others redo its microbatches, then take the checkpoint.
    """

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, PreemptRequested):
            return self._begin(state, event)
        if state.preempting is None:
            return ()
        if isinstance(event, PreemptExpired):
            return (_stop(state, None, ", and some workers were still there at the deadline"),)
        if isinstance(event, WorkerJoined):
            return (Release(worker_id=event.member.worker_id, reason="the job makes room: nobody joins it any more"),)
        if isinstance(event, WorkerLeft | WorkerFinished | WorkerLost | WorkerFailed | HostLost):
            return self._gone(state, event)
        return ()

    def _begin(self, state: JobState, event: PreemptRequested) -> tuple[AnyAction, ...]:
        if not preempts(state, event.deadline):
            return ()
        if state.restoring:
            return (_stop(replace(state, preempting=PreemptionOrder(reason=event.reason)), None, " as it began again"),)
        if state.generation is None:
            reason = f"preempted ({event.reason}) before the first step: there was nothing to save"
            return (Stop(reason=reason, exit_code=EXIT_PREEMPTED),)
        # Workers that are about to join leave with the members.
        joining = state.upcoming.worker_ids if state.upcoming is not None else ()
        spares = [worker_id for worker_id in state.spares if worker_id not in joining]
        ends = [Release(worker_id=each, reason=f"a spare of a job that makes room: {event.reason}") for each in spares]
        actions: tuple[AnyAction, ...] = (Preempt(deadline=event.deadline, reason=event.reason), *ends)
        if state.holding:
            left = len(state.members)
            who = "1 worker redoes" if left == 1 else f"{left} workers redo"
            reason = f"nobody will take the place of those lost: {who} their microbatches"
            actions += (Reconfigure(members=state.members, reason=reason),)
        return actions

    def _gone(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if state.having("member") or state.having("finished"):
            # Some still work, or every step was done before the preemption.
            return ()
        if isinstance(event, WorkerFailed) and not state.having("left"):
            # No worker reached the boundary: an exception on the last worker is a bug, as always.
            return ()
        step = event.step if isinstance(event, WorkerLeft | WorkerFinished) else None
        return (_stop(state, step, ""),)


def _stop(state: JobState, step: int | None, why: str) -> Stop:
    """Return the end of a preempted job; ``step``: its committed steps, if known."""
    assert state.preempting is not None
    newest = state.checkpoint
    if newest is None:
        outcome = "there is no checkpoint, so the job begins anew"
    elif step is not None and newest.step >= step:
        outcome = f"checkpoint of step {newest.step} is complete, go on with --resume"
    else:
        outcome = f"the newest checkpoint is that of step {newest.step}, go on with --resume"
    return Stop(reason=f"preempted ({state.preempting.reason}){why}: {outcome}", exit_code=EXIT_PREEMPTED)
