"""The technique that answers alerts of other systems; the last one, so that all others answer before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from craft.decide.job.alerts import AlertSettings
from craft.decide.policies.alert import AlertPolicy
from craft.decide.policies.policy import Policy
from craft.decide.techniques.technique import Technique
from craft.protocol.events import AlertFired, AlertResolved, PreemptRequested


class Alerts(Technique[AlertSettings]):
    """Its settings are the tables ``[[alerts]]`` and ``[hooks.NAME]`` of craft.toml."""

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
