"""Alerts of other systems. Last of all: whoever knows better answers before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from craft.decide.job.alerts import AlertSettings
from craft.decide.policies.alert import AlertPolicy
from craft.decide.policies.policy import Policy
from craft.decide.techniques.technique import Technique
from craft.protocol.events import AlertFired, AlertResolved, PreemptRequested


class Alerts(Technique[AlertSettings]):
    """Its settings have tables of their own in craft.toml: ``[[alerts]]`` and ``[hooks.NAME]``."""

    name = "alerts"
    summary = "answers alerts that come over HTTP by the rules of craft.toml"
    Settings = AlertSettings
    before = ()
    emits = (AlertFired, AlertResolved)
    answers = (AlertFired,)

    def objection(self, others: Mapping[str, Technique[Any]]) -> str | None:
        if "preempt" not in self.settings.answers() or any(
            PreemptRequested in each.answers for each in others.values()
        ):
            return None
        return "a rule or hook has the answer preempt, so let preemption be on"

    def policies(self) -> Sequence[Policy]:
        return (AlertPolicy(),)
