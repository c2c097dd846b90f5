"""Answer what detectors find: hanging workers, slow workers, unhealthy GPUs."""

from __future__ import annotations

from craft.decide.detect.gpu_health import ECC, HEAT, LOST, XID, HealthAnswer, HealthSettings
from craft.decide.job.last_copy import STOPPED
from craft.decide.job.state import JobState
from craft.decide.policies.broken import reform_group
from craft.decide.policies.requests import drain
from craft.protocol.actions import AnyAction, DeclareLost, Probe, RequestDrain
from craft.protocol.events import AnyEvent, ConditionSeen, DrainRequested, StragglerFound, WorkerOverdue

EXCHANGING = "exchanging"
CALLING = "calling"
ENDING = "ending"


def waits(phase: str, overdue: str) -> bool:
    """Return whether a member in ``phase`` waits for one that is overdue in the phase ``overdue``.

    Members that went past a call, to the next step or the end of the loop, wait for one that is in it.
    """
    return phase in ((EXCHANGING, ENDING) if overdue == CALLING else (EXCHANGING, CALLING))


def is_elsewhere(phase: str, overdue: str) -> bool:
    """Return whether a member in ``phase`` is busy elsewhere and may come to where the overdue one is."""
    return not waits(phase, overdue) and not phase == overdue == CALLING


class HangPolicy:
    """Ends a worker that blocks the others; if all wait for each other, makes them probe whom they can reach."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, WorkerOverdue):
            return ()
        view = state.view(event.worker_id)
        if view is None or view.standing not in ("waiting", "member"):
            return ()
        if event.phase in (EXCHANGING, CALLING):
            return self._exchanging(state, event)
        alone = not event.waiting and not event.elsewhere
        if event.phase != STOPPED and not event.waiting and not alone:
            # No member waits for it: all do something long, such as a validation.
            return ()
        return (DeclareLost(worker_id=event.worker_id, source="watch", reason=event.detail),)

    def _exchanging(self, state: JobState, event: WorkerOverdue) -> tuple[AnyAction, ...]:
        current = state.generation
        if current is None or event.elsewhere or not event.waiting or state.probing == current.number:
            return ()
        if event.phase == CALLING:
            if state.holding or any(view.entered < current.number for view in state.having("member")):
                # Others in the same call reported that just before, and the group is re-forming.
                return ()
            # On re-forming, each member claims its position; if the calls differ, all find out.
            return reform_group(
                state, f"every member waits for another, and {event.worker_id} in a call between the steps: all"
            )
        return (Probe(generation=current.number, reason="every member waits in the exchange for another"),)


def _can_spare(state: JobState, worker_id: str) -> bool:
    """Whether enough workers stay if this one leaves: better a slow worker or GPU than too few."""
    if state.replica_size == 1:
        return len(state.staying) + len(state.spares) - 1 >= max(1, state.min_workers)
    others = tuple(each for each in state.staying if each != worker_id)
    return state.is_enough((*others, *state.fitting(others)))


class StragglerPolicy:
    """Drains a slow worker, where that is the answer. Workers do all else by themselves."""

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, StragglerFound) or event.answer != "drain" or state.ending:
            return ()
        view = state.view(event.worker_id)
        if view is None or view.standing != "member" or not _can_spare(state, event.worker_id):
            return ()
        reason = f"is slow: a microbatch takes {event.ratio:g} times as long there as elsewhere"
        return drain(state, DrainRequested(worker_id=event.worker_id, reason=reason))


class HealthPolicy:
    """Drains or replaces the worker of an unhealthy GPU, as the settings say for each condition."""

    def __init__(self, technique: str, settings: HealthSettings) -> None:
        self._technique = technique
        self._settings = settings
        self._answers: dict[str, HealthAnswer] = {
            LOST: settings.lost,
            ECC: settings.ecc,
            XID: settings.xid,
            HEAT: settings.heat,
        }

    def decide(self, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
        if not isinstance(event, ConditionSeen) or event.technique != self._technique or state.ending:
            return ()
        view = state.view(event.worker_id)
        if view is None or view.standing not in ("member", "waiting") or view.draining is not None:
            return ()
        answer = self._answers.get(event.what, "report")
        if answer == "replace":
            return (DeclareLost(worker_id=event.worker_id, source="health", reason=event.detail),)
        if answer == "drain" and _can_spare(state, event.worker_id):
            return (RequestDrain(worker_id=event.worker_id, deadline_s=self._settings.drain_s, reason=event.detail),)
        return ()
