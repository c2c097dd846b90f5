"""Alerts of other systems. Last of all: whoever knows better answers before."""

from __future__ import annotations

from collections.abc import Sequence

from craft.decide.alerts import AlertSettings
from craft.decide.policies.alert import AlertPolicy
from craft.decide.policies.policy import Policy
from craft.decide.technique import Technique
from craft.protocol.events import AlertFired, AlertResolved


class Alerts(Technique[AlertSettings]):
    """Its settings have tables of their own in craft.toml: ``[[alerts]]`` and ``[hooks.NAME]``."""

    name = "alerts"
    summary = "answers alerts that come over HTTP by the rules of craft.toml"
    Settings = AlertSettings
    before = ()
    emits = (AlertFired, AlertResolved)
    answers = (AlertFired,)

    def policies(self) -> Sequence[Policy]:
        return (AlertPolicy(),)
