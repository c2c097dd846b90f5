"""What this process is in its job: ``join`` and ``attend`` set it, and what ends the process reads it."""

from __future__ import annotations

from functools import cached_property

from craft.settings.worker import WorkerSettings
from craft.snapshots.state.reserved_memory import Reserve
from craft.worker.api.job import Job
from craft.worker.external.external_worker import Guest
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel


class WorkerProcess:
    """There is one, ``process``; its attributes are None until they are set."""

    job: Job | None = None
    """The job that this process has joined."""
    guest: Guest | None = None
    """What ``craft.attend`` returned."""
    channel: Channel | None = None
    """The channel to the agent; None outside of ``craft run``."""
    reserve: Reserve | None = None
    """Memory for the state that a late worker will receive."""

    @cached_property
    def activity(self) -> ActivityPage:
        return ActivityPage(WorkerSettings.from_environment().activity)


process = WorkerProcess()
