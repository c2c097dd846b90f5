"""A technique of another package: a worker whose device runs hot leaves in order, before the device fails.

It learns of heat in two ways: from an alert of the name that its settings give (the active path), and from a sensor that
every worker reads after a step (the passive path). Either way its policy has the worker drained; the others, and a spare
in its place if there is one, go on with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from craft.techniques import ConfigError, Hooks, JobState, Policy, Surroundings, Technique, actions, events, says

HOT = "heat"


class ThermalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    alert: Annotated[str, says("The name of the alert that says that a device runs hot.")] = "DeviceTooHot"
    sensor: Annotated[
        str | None,
        says("A file with millidegrees, such as Linux has; {local_rank} in it is the worker's place on its host."),
    ] = None
    limit_c: Annotated[float, says("A sensor that shows more than this is too hot.")] = 90.0
    every_s: Annotated[float, says("How often a worker looks at it, at most.")] = 1.0
    deadline_s: Annotated[float, says("Whoever is still there after this long is ended.")] = 30.0


class Thermal(Technique[ThermalSettings]):
    """The lighthouse imports this, too: what a worker does is in a module of its own."""

    name = "thermal"
    summary = "lets workers whose device runs hot leave in order"
    Settings = ThermalSettings
    emits = (events.ConditionSeen,)
    answers = (events.AlertFired, events.ConditionSeen)
    points = ("after_commit",)
    # An alert of that name is answered here, whatever the rules for alerts say.
    before = ("alerts",)

    @classmethod
    def check(cls, settings: ThermalSettings) -> None:
        if settings.every_s < 0 or settings.deadline_s < 0:
            raise ConfigError("technique thermal: every_s and deadline_s are numbers of seconds, at least 0")

    def policies(self) -> Sequence[Policy]:
        return (ThermalPolicy(self.settings),)

    def hooks(self, surroundings: Surroundings) -> Hooks | None:
        if self.settings.sensor is None:
            return None
        from craft_thermal.sensor import Sensor

        return Sensor(self.settings, surroundings)


class ThermalPolicy:
    """A pure function of the job's state and an event."""

    def __init__(self, settings: ThermalSettings) -> None:
        self._settings = settings

    def decide(self, state: JobState, event: events.AnyEvent) -> tuple[actions.AnyAction, ...]:
        if isinstance(event, events.ConditionSeen) and (event.technique, event.what) == (Thermal.name, HOT):
            return self._drain(event.worker_id, None, event.detail)
        if isinstance(event, events.AlertFired) and event.name == self._settings.alert:
            return self._drain(event.worker_id, event.host, event.reason)
        return ()

    def _drain(self, worker_id: str | None, host: str | None, reason: str) -> tuple[actions.AnyAction, ...]:
        if worker_id is None and host is None:
            return ()
        request = actions.RequestDrain(
            worker_id=worker_id,
            host=host,
            deadline_s=self._settings.deadline_s,
            reason=f"its device runs hot: {reason}",
        )
        return (request,)
