"""Pauses of a worker: within one it is never overdue, and a long one gets a line in the journal when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.reporter import Reporter

WORTH_TELLING_S = 1.0
"""A pause shorter than this holds nobody up for long enough to be asked about."""


@contextmanager
def paused(activity: ActivityPage, reporter: Reporter, reason: str) -> Iterator[None]:
    """Pause this worker, and tell of it afterwards if that took long."""
    began = time.monotonic()
    try:
        with activity.paused(reason):
            yield
    finally:
        seconds = time.monotonic() - began
        if seconds >= WORTH_TELLING_S:
            reporter.paused(reason, seconds)
