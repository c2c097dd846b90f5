"""Policies: pure functions ``(JobState, Event) -> (Action, ...)``. Each belongs to a technique; the first answer counts."""

from __future__ import annotations

from craft.decide.policies.alert import AlertPolicy
from craft.decide.policies.broken import BrokenPolicy
from craft.decide.policies.detected import HangPolicy, StragglerPolicy
from craft.decide.policies.finish import FinishPolicy
from craft.decide.policies.last_copy import LastCopyPolicy
from craft.decide.policies.loss import LossPolicy
from craft.decide.policies.membership import FormPolicy, JoinPolicy, RecoverPolicy
from craft.decide.policies.policy import EXIT_BUG, EXIT_FINISHED, EXIT_GIVEN_UP, EXIT_PREEMPTED, Policy, decide
from craft.decide.policies.preempt import PreemptPolicy
from craft.decide.policies.requests import AbortPolicy, CheckpointPolicy, DrainPolicy
from craft.decide.policies.restore import RestorePolicy
from craft.decide.policies.stop import StopPolicy

__all__ = [
    "EXIT_BUG",
    "EXIT_FINISHED",
    "EXIT_GIVEN_UP",
    "EXIT_PREEMPTED",
    "AbortPolicy",
    "AlertPolicy",
    "BrokenPolicy",
    "CheckpointPolicy",
    "DrainPolicy",
    "FinishPolicy",
    "FormPolicy",
    "HangPolicy",
    "JoinPolicy",
    "LastCopyPolicy",
    "LossPolicy",
    "Policy",
    "PreemptPolicy",
    "RecoverPolicy",
    "RestorePolicy",
    "StopPolicy",
    "StragglerPolicy",
    "decide",
]
