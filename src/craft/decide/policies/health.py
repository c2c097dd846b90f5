"""GPUs that are not well."""

from __future__ import annotations

from craft.decide.detect.gpu_health import ECC, HEAT, LOST, XID, HealthAnswer, HealthSettings
from craft.decide.job.state import JobState
from craft.protocol.actions import AnyAction, DeclareLost, RequestDrain
from craft.protocol.events import AnyEvent, ConditionSeen


class HealthPolicy:
    """Lets the worker of a GPU that is not well leave, or has it replaced, as the settings say for each condition."""

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
        if answer == "drain" and len(state.staying) + len(state.spares) - 1 >= max(1, state.min_workers):
            return (RequestDrain(worker_id=event.worker_id, deadline_s=self._settings.drain_s, reason=event.detail),)
        # Better a GPU that is not well than too few.
        return ()
