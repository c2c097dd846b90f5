"""The outcome of a job, as one host sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from craft.protocol.messages import WorkerReport


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the job ended, as this host sees it."""

    exit_code: int
    reason: str
    traceback: str | None = None
    faults: tuple[str, ...] | None = None
    """All faults of the job, if its journal is on another host; None: see the journal."""
    checkpoint: dict[str, Any] | None = None
    """The newest checkpoint of the job, if its journal is on another host."""


def after_training(outcome: JobOutcome, reports: Iterable[WorkerReport]) -> JobOutcome:
    """Return the outcome, or the failure of a script after its last step."""
    # Failures before the last step were handled when they happened, even if the process ends late.
    failures = (report.failed for report in reports if report.complete)
    failed = next((failed for failed in failures if failed is not None), None)
    if failed is None:
        return outcome
    reason = f"{failed.error} (worker {failed.worker_id}, after the last step)"
    return JobOutcome(exit_code=1, reason=reason, traceback=failed.traceback)


def with_status(outcome: JobOutcome, status: dict[str, Any]) -> JobOutcome:
    """Return the outcome with the faults and the checkpoint in the lighthouse's status."""
    faults = tuple(f"{', '.join(fault['worker_ids'])}: {fault['reason']}" for fault in status["fault_list"])
    return msgspec.structs.replace(outcome, faults=faults, checkpoint=status["checkpoints"]["last"])
