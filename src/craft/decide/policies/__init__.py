"""Policies: pure functions ``(JobState, Event) -> (Action, ...)``. The first in the list that answers wins."""

from __future__ import annotations

from craft.decide.policies.alert import AlertPolicy
from craft.decide.policies.broken import BrokenPolicy
from craft.decide.policies.drain import DrainPolicy
from craft.decide.policies.form import FormPolicy
from craft.decide.policies.hang import HangPolicy
from craft.decide.policies.join import JoinPolicy
from craft.decide.policies.loss import LossPolicy
from craft.decide.policies.policy import EXIT_BUG, EXIT_FINISHED, EXIT_GIVEN_UP, EXIT_PREEMPTED, Policy, decide
from craft.decide.policies.preempt import PreemptPolicy
from craft.decide.policies.recover import RecoverPolicy
from craft.decide.policies.stop import StopPolicy
from craft.decide.settle import LossAnswer

__all__ = [
    "EXIT_BUG",
    "EXIT_FINISHED",
    "EXIT_GIVEN_UP",
    "EXIT_PREEMPTED",
    "AlertPolicy",
    "BrokenPolicy",
    "DrainPolicy",
    "FormPolicy",
    "HangPolicy",
    "JoinPolicy",
    "LossPolicy",
    "Policy",
    "PreemptPolicy",
    "RecoverPolicy",
    "StopPolicy",
    "decide",
    "default_policies",
]


def default_policies(on_loss: LossAnswer = "redo", wait_limit_s: float = 60.0) -> tuple[Policy, ...]:
    """The built-in policies, in the order in which they are asked."""
    return (
        PreemptPolicy(),
        StopPolicy(),
        FormPolicy(),
        LossPolicy(on_loss, wait_limit_s),
        RecoverPolicy(),
        HangPolicy(),
        BrokenPolicy(),
        DrainPolicy(),
        JoinPolicy(),
        AlertPolicy(),
    )
