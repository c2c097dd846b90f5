"""``craft.join()``: become a worker of the job that ``craft run`` started, or a job of one where nobody did."""

from __future__ import annotations

import os

from craft.groups.store import Store
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Broken, Directive, WorkerReport
from craft.settings.worker import WorkerSettings
from craft.worker.channel import Channel
from craft.worker.job import Job
from craft.worker.meeting import Meeting
from craft.worker.points import reach

_job: Job | None = None
_channel: Channel | None = None


def connect() -> Channel | None:
    """Open the channel to the agent; once per process. None outside of ``craft run``."""
    global _channel
    settings = WorkerSettings.from_environment()
    if _channel is None and settings.socket is not None:
        _channel = Channel(settings.socket, WorkerReport(member=_member(settings), pid=os.getpid()))
    return _channel


def joined() -> Job | None:
    """The job that this process has joined, if it has."""
    return _job


def join() -> Job:
    """Join the job; blocks until the first generation is made. Called again, it returns the same job."""
    global _job
    if _job is not None:
        return _job
    settings = WorkerSettings.from_environment()
    channel = connect()

    def broke(generation: int, detail: str) -> None:
        if channel is not None:
            channel.report(broken=Broken(generation=generation, detail=detail))

    meeting = Meeting(settings.worker_id, settings.address, broke)
    reach("join", 0)
    if channel is None:
        alone = Generation(number=1, nonce="alone", members=(_member(settings),))
        meeting.direct(Directive(sequence=1, generation=alone))
    else:
        store = Store(settings.address)
        _stores.append(store)
        member = Member(
            worker_id=settings.worker_id, host=settings.host, address=settings.address, store_port=store.port
        )
        channel.listen(meeting.direct)
        channel.report(member=member, joined=True)
        meeting.wait_generation()
    _job = Job(settings, meeting, channel)
    return _job


# A store lives as long as the process: a generation may be meeting there at any time.
_stores: list[Store] = []


def _member(settings: WorkerSettings) -> Member:
    return Member(worker_id=settings.worker_id, host=settings.host, address=settings.address)
