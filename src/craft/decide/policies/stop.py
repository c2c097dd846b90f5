"""Answer what ends the job."""

from __future__ import annotations

from craft.decide.job.state import JobState
from craft.decide.policies.policy import EXIT_BAD_INPUT, EXIT_BUG, EXIT_FINISHED, names
from craft.protocol.actions import AnyAction, Stop, WindDown
from craft.protocol.events import AnyEvent, StateDiverged, StopRequested, WorkerFailed, WorkerFinished, WorkerLeft


class StopPolicy:
    """Ends the job: on request, on divergence, on a bug in the script, when all workers finished."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if isinstance(event, StopRequested) and state.preempting is not None:
            # It ends at the next step boundary, with a checkpoint.
            return ()
        if isinstance(event, StopRequested):
            if state.generation is None:
                return (Stop(reason=event.reason, exit_code=EXIT_FINISHED),)
            return (WindDown(reason=event.reason),)
        if isinstance(event, StateDiverged):
            return (Stop(reason=f"state diverged: {event.detail}", exit_code=EXIT_BUG),)
        if isinstance(event, WorkerFailed):
            return self._failed(state, event)
        if isinstance(event, WorkerFinished) or (isinstance(event, WorkerLeft) and state.having("finished")):
            return self._finished(state)
        return ()

    def _failed(self, state: JobState, event: WorkerFailed) -> tuple[AnyAction, ...]:
        """Answer an exception: a fault like any other, unless it would happen again."""
        if event.late and event.refused and state.having("member"):
            # The others were accepted: this one lacks something, such as a package or a disk.
            return ()
        if event.refused:
            return (Stop(reason=event.error, exit_code=EXIT_BAD_INPUT),)
        if event.everywhere:
            return (Stop(reason=event.error, exit_code=EXIT_BUG, traceback=event.traceback),)
        if event.hardware and state.having("member"):
            # Another worker redoes it, on another device or on this one after a reset.
            return ()
        if event.step is None:
            if event.late and (state.generation is not None or state.restoring):
                # The script works on the others: the fault is with this worker.
                return ()
            reason = f"{event.error} (worker {event.worker_id}, before the first step)"
            return (Stop(reason=reason, exit_code=EXIT_BUG, traceback=event.traceback),)
        again = [
            other
            for other in state.failures
            if other.worker_id != event.worker_id
            and not other.hardware
            and (other.step, other.microbatch) == (event.step, event.microbatch)
        ]
        where = f"step {event.step}" + ("" if event.microbatch is None else f", microbatch {event.microbatch}")
        if again:
            reason = f"{event.error} ({where} failed on workers {again[0].worker_id} and {event.worker_id})"
            return (Stop(reason=reason, exit_code=EXIT_BUG, traceback=event.traceback),)
        if not state.having("member"):
            reason = f"{event.error} ({where} failed on worker {event.worker_id}, the last one)"
            return (Stop(reason=reason, exit_code=EXIT_BUG, traceback=event.traceback),)
        return ()

    def _finished(self, state: JobState) -> tuple[AnyAction, ...]:
        if state.having("member") or state.unfinished_scripts:
            return ()
        if state.generation is None and (state.having("waiting") or state.absent < state.slots):
            # Nothing has begun: workers that have yet to join can do the whole job.
            return ()
        if state.generation is not None and not state.having("finished"):
            # The last one exited 0 before its end: a loss like any other.
            return ()
        if unequal := _unequal(state):
            return (Stop(reason=unequal, exit_code=EXIT_BUG),)
        return (Stop(reason=f"every worker finished{_how_far(state)}", exit_code=EXIT_FINISHED),)


def _how_far(state: JobState) -> str:
    """Return what to add to "every worker finished"; empty if all planned steps are done."""
    if state.winding_down is not None:
        return f", as asked: {state.winding_down}"
    if state.generation is None:
        return " before it joined the others: nothing was trained"
    cut = next((view.cut for view in state.having("finished") if view.cut is not None), None)
    return "" if cut is None else f" after {cut[0]} of {cut[1]} steps: the script left its loop there"


def _unequal(state: JobState) -> str:
    """Return who finished with a different state, in words; empty if all are equal."""
    found: dict[tuple[int, str], list[str]] = {}
    for view in state.having("finished"):
        if view.digest is not None:
            # Workers at different positions have different shards.
            position = state.position_of(view.member.worker_id)
            found.setdefault((position, view.digest), []).append(view.member.worker_id)
    if len(found) == len({position for position, _ in found}):
        return ""
    who = " | ".join(names(worker_ids) for worker_ids in found.values())
    return (
        f"the workers finished with different states ({who}): something in the script is not the same on every worker,"
        " such as state that is not registered, or random numbers drawn between the steps"
    )
