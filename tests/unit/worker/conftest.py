"""Hypothesis without a clock: a shared machine is slow at times, and a test must not fail for that."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("craft", deadline=None, database=None, derandomize=True)
settings.load_profile("craft")
