"""``craft.join()``: become a worker of the job that ``craft run`` started, or a job of one where nobody did.

``craft.attend()``: the same for a loop that is not CRAFT's.
"""

from __future__ import annotations

import atexit
import logging
import os

from msgspec.structs import replace

from craft.groups.rendezvous import RendezvousStore
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Broken, Directive, WorkerReport
from craft.protocol.values.activity import Phase
from craft.protocol.values.inspection import Stacks
from craft.settings import torchrun
from craft.settings.rundir import RunDir
from craft.settings.worker import WorkerSettings
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.transfer.donor import Donor
from craft.telemetry.fault_points import reach
from craft.worker.api.adapter_access import finish
from craft.worker.api.job import Job
from craft.worker.entry import refusal_exit, temporary_files, torchrun_attach
from craft.worker.entry.malloc_tuning import keep_for_next_step
from craft.worker.external.external_store import ExternalStore
from craft.worker.external.external_worker import Guest
from craft.worker.external.generation_follower import Abort
from craft.worker.loop.injected_faults import InjectedFaults, install
from craft.worker.membership.client import Left, MembershipClient
from craft.worker.report import flight_recorder, stacks
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel

logger = logging.getLogger(__name__)

_job: Job | None = None
_guest: Guest | None = None
_channel: Channel | None = None
_activity: ActivityPage | None = None
_reserve: Reserve | None = None


def connect() -> Channel | None:
    """Open the channel to the agent; once per process. None outside of ``craft run``."""
    global _channel
    adopted = _channel is None and torchrun_attach.seek_agent()
    settings = WorkerSettings.from_environment()
    if _channel is None and settings.socket is not None:
        report = WorkerReport(member=_member(settings), pid=os.getpid())
        _channel = Channel(settings.socket, report, activity().beat)
        _channel.look = lambda look: flight_recorder.answer(look.number, settings.worker_id)
        _channel.stacks = lambda look: Stacks(
            number=look.number, worker_id=settings.worker_id, text=stacks.of_all_threads()[-stacks.MAX_CHARS :]
        )
    if adopted:
        # What is done for those who are forked before their script begins.
        temporary_files.keep_with_agent(settings.activity)
        stacks.register(RunDir(settings.run_dir).stacks(settings.worker_id) if settings.run_dir is not None else None)
        set_aside()
        torchrun_attach.Ending()
    return _channel


def set_aside() -> None:
    """Take memory for the state that a worker which comes later will get, while its script starts."""
    global _reserve
    settings = WorkerSettings.from_environment()
    if settings.carried_bytes:
        _reserve = Reserve(settings.carried_bytes)


def activity() -> ActivityPage:
    """Where this process says what it is doing; one per process."""
    global _activity
    if _activity is None:
        _activity = ActivityPage(WorkerSettings.from_environment().activity)
    return _activity


def joined() -> Job | None:
    """The job that this process has joined, if it has."""
    return _job


def join() -> Job:
    """Join the job; blocks until the first generation is made. Called again, it returns the same job.

    In a worker that comes later, as a spare or in the place of a lost one, it returns at once: that one has no rank yet.
    """
    global _job
    if _job is not None:
        return _job
    if _guest is not None:
        raise ConfigError("craft.join() after craft.attend(): a loop is either CRAFT's or not")
    torchrun.check_alone()
    channel = connect()
    settings = WorkerSettings.from_environment()
    keep_for_next_step()
    membership = _membership(settings, channel)
    reach("join", 0)
    activity().now(Phase.JOINING)
    donor = None
    if channel is None:
        refusal_exit.install()
        alone = Generation(number=1, nonce="alone", members=(_member(settings),))
        membership.direct(Directive(sequence=1, generation=alone))
        # Under ``craft run`` the end of the script is seen by what runs it.
        atexit.register(lambda: finish(_job) if _job is not None else None)
    else:
        donor = _take_part(settings, channel, membership)
    _job = Job(settings, membership, channel, activity(), donor, _reserve)
    activity().now(Phase.STARTING)
    return _job


def join_anew() -> Job:
    """Become another job of one, for a script that trains more than once; outside of ``craft run`` only."""
    global _job
    if connect() is None:
        _job = None
    return join()


def _membership(settings: WorkerSettings, channel: Channel | None) -> MembershipClient:
    def broke(broken: Broken) -> None:
        if channel is not None:
            channel.report(broken=broken, progress=membership.progress)

    def left() -> None:
        logger.info("leaves the job, as it was told")
        if channel is not None:
            channel.report(left=True)

    membership = MembershipClient(settings.worker_id, settings.address, settings.state_key_bytes, broke, left)
    return membership


def _take_part(settings: WorkerSettings, channel: Channel, membership: MembershipClient) -> Donor:
    """Say where this worker can be found, and follow directives from now on. Returns what gives its state to others."""
    store = RendezvousStore(settings.address, settings.state_key_bytes)
    _stores.append(store)
    donor = Donor(settings.address, settings.state_key_bytes)
    member = replace(
        _member(settings),
        store_port=store.port,
        state_port=donor.port,
        local_rank=settings.local_rank,
        late=settings.late,
    )
    channel.report(member=member, joined=not settings.late)
    injections = InjectedFaults(settings.worker_id, membership.cut_one)
    install(injections)

    def directed(directive: Directive) -> None:
        injections.take(directive)
        membership.direct(directive)

    channel.listen(directed)
    if settings.late:
        # The others are on their way: they hear of this one when it can take part at once, at its first step.
        membership.wait_directive()
    else:
        membership.wait_generation()
    return donor


def attending() -> Guest | None:
    """The guest that this process is, if it is one."""
    return _guest


def attend(abort: Abort | None = None, *, saves: bool = False, meets: bool = False) -> Guest:
    """Take part in the job with a loop and groups that are not CRAFT's; blocks until this worker is in a generation.

    ``abort(change)`` is called on a thread of its own as soon as somebody is gone, or everybody is to abort. ``saves``:
    whether the loop saves its state when it is told to leave. ``meets``: whether its groups are to meet at a store in rank 0,
    by the variables that torchrun sets. Called again, it returns the same guest, which calls the further ``abort``, too.
    Outside of ``craft run`` nothing ever changes.
    """
    global _guest
    if _job is not None:
        raise ConfigError("craft.attend() after craft.join(): a loop is either CRAFT's or not")
    channel = connect()
    if _guest is None:
        settings = WorkerSettings.from_environment()
        _guest = Guest(settings, channel, activity())
        if abort is not None:
            # Before anything can change.
            _guest.on_change(abort)
        if channel is not None:
            activity().now(Phase.JOINING)
            external_store = ExternalStore(settings.address) if meets else None
            member = replace(
                _member(settings),
                store_port=external_store.port if external_store is not None else 0,
                local_rank=settings.local_rank,
                late=settings.late,
                guest=True,
            )
            channel.report(member=member, joined=True)
            channel.listen(_guest.direct)
            if not _guest.await_slot():
                raise Left(0)
            if external_store is not None:
                _venues.append(external_store)
                os.environ.update(_guest.variables)
        activity().now(Phase.STARTING)
    elif abort is not None:
        _guest.on_change(abort)
    if channel is not None and saves:
        channel.report(checkpoints=True)
    return _guest


# A store lives as long as the process: a generation may be meeting there at any time.
_stores: list[RendezvousStore] = []
_venues: list[ExternalStore] = []


def _member(settings: WorkerSettings) -> Member:
    return Member(worker_id=settings.worker_id, host=settings.host, address=settings.address)
