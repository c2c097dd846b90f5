"""Policies: pure functions ``(JobState, Event) -> (Action, ...)``. Each belongs to a technique; the first answer counts."""

from __future__ import annotations

from craft.decide.policies.policy import Policy, decide

__all__ = ["Policy", "decide"]
