"""Policies: pure functions ``(JobState, Event) -> (Action, ...)``. Each belongs to a technique; the first answer counts."""
