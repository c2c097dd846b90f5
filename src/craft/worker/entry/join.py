"""``craft.join()`` and ``craft.attend()``: join the job of ``craft run``, or become a job of one worker without it."""

from __future__ import annotations

import atexit
import logging
import os

from msgspec import UNSET
from msgspec.structs import replace

from craft.groups.rendezvous import RendezvousStore
from craft.groups.sharded.install import install
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Generation, Member, Slot
from craft.protocol.messages import Broken, Directive, WorkerReport
from craft.protocol.values.activity import Phase
from craft.protocol.values.inspection import Stacks
from craft.settings import torchrun
from craft.settings.worker import WorkerSettings
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.transfer.donor import Donor
from craft.telemetry.fault_points import reach
from craft.worker.api.adapter_access import finish
from craft.worker.api.job import Job
from craft.worker.entry import process_setup, torchrun_attach
from craft.worker.entry.script_end import EndReporter, exit_with_refusal_code
from craft.worker.entry.worker_process import process
from craft.worker.external.external_store import ExternalStore
from craft.worker.external.external_worker import Guest
from craft.worker.external.generation_follower import Abort
from craft.worker.loop.inner_loop import injected_faults
from craft.worker.loop.inner_loop.injected_faults import InjectedFaults
from craft.worker.membership.client import Left, MembershipClient
from craft.worker.replica.link import ReplicaLink
from craft.worker.replica.recorded_outputs import RecordedOutputs
from craft.worker.report import flight_recorder, stacks
from craft.worker.report.channel import Channel

logger = logging.getLogger(__name__)


def connect() -> Channel | None:
    """Open the channel to the agent; once per process. None outside of ``craft run``."""
    attached = process.channel is None and torchrun_attach.attach_to_agent()
    settings = WorkerSettings.from_environment()
    if process.channel is None and settings.socket is not None:
        report = WorkerReport(member=_member(settings), pid=os.getpid())
        process.channel = Channel(
            settings.socket,
            report,
            process.activity.beat,
            stacks=lambda look: Stacks(
                number=look.number, worker_id=settings.worker_id, text=stacks.of_all_threads()[-stacks.MAX_CHARS :]
            ),
            collectives=lambda look: flight_recorder.read_collectives(look.number, settings.worker_id),
        )
    if attached:
        # ``script_runner`` does the same for forked workers.
        process_setup.prepare(settings)
        reserve_memory()
        EndReporter()
    return process.channel


def reserve_memory() -> None:
    """Reserve memory for the state that a late worker will receive, while its script starts."""
    settings = WorkerSettings.from_environment()
    if settings.carried_bytes:
        process.reserve = Reserve(settings.carried_bytes)


def join() -> Job:
    """Join the job; blocks until the first generation is made. Called again, it returns the same job.

    A late worker (a spare or a replacement) returns at once: it has no rank yet.
    """
    if process.job is not None:
        return process.job
    if process.guest is not None:
        raise ConfigError("craft.join() after craft.attend(): a process uses one of them")
    torchrun.check_alone()
    channel = connect()
    settings = WorkerSettings.from_environment()
    process_setup.reuse_freed_memory()
    membership = _membership(settings, channel)
    reach("join", 0)
    process.activity.now(Phase.JOINING)
    donor = None
    if channel is None:
        exit_with_refusal_code()
        alone = Generation(number=1, nonce="alone", members=(_member(settings),))
        membership.direct(Directive(sequence=1, generation=alone))
        # Under ``craft run`` the script runner sees the end of the script.
        atexit.register(lambda: finish(process.job) if process.job is not None else None)
    else:
        donor = _follow_directives(settings, channel, membership)
    link = _link(settings, membership, donor)
    process.job = Job(settings, membership, channel, process.activity, donor, process.reserve, link)
    process.activity.now(Phase.STARTING)
    return process.job


def _link(settings: WorkerSettings, membership: MembershipClient, donor: Donor | None) -> ReplicaLink | None:
    """Make this worker's replica torch's world, if it has several workers."""
    if settings.replica_size == 1:
        return None
    outputs = RecordedOutputs(donor, settings.state_key_bytes)
    link = ReplicaLink(settings, membership, outputs, process.activity.waiting)
    install(link)
    return link


def join_anew() -> Job:
    """Start another job of one worker, for a script that trains more than once; only outside of ``craft run``."""
    if connect() is None:
        process.job = None
    return join()


def _membership(settings: WorkerSettings, channel: Channel | None) -> MembershipClient:
    def broke(broken: Broken) -> None:
        if channel is not None:
            channel.report(broken=broken, progress=membership.progress)

    def left() -> None:
        logger.info("leaving the job as ordered")
        if channel is not None:
            channel.report(left=True)

    membership = MembershipClient(settings.worker_id, settings.address, settings.state_key_bytes, broke, left)
    return membership


def _follow_directives(settings: WorkerSettings, channel: Channel, membership: MembershipClient) -> Donor:
    """Report this worker's addresses and follow directives from now on. Returns the donor of its state."""
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
    injected_faults.install(injections)

    def directed(directive: Directive) -> None:
        injections.take(directive)
        membership.direct(directive)

    channel.listen(directed)
    if settings.late:
        # The others are training: this worker is announced when it can take part at once, at its first step.
        membership.wait_directive()
    else:
        membership.wait_generation()
    return donor


def attend(abort: Abort | None = None, *, saves: bool = False, meets: bool = False) -> Guest:
    """Join the job with another framework's loop and groups; blocks until this worker is in a generation.

    ``abort(change)`` is called on a separate thread as soon as a member is gone, or every member must abort. ``saves``:
    whether the loop saves its state when it has to leave. ``meets``: whether its groups rendezvous at a store in rank 0,
    found by torchrun's variables. Called again, it returns the same guest, which then calls the new ``abort``, too.
    Outside of ``craft run`` no change ever happens.
    """
    if process.job is not None:
        raise ConfigError("craft.attend() after craft.join(): a process uses one of them")
    channel = connect()
    guest = process.guest
    if guest is None:
        settings = WorkerSettings.from_environment()
        guest = process.guest = Guest(settings, channel, process.activity)
        if abort is not None:
            # Before a directive can arrive.
            guest.on_change(abort)
        if channel is not None:
            process.activity.now(Phase.JOINING)
            external_store = ExternalStore(settings.address) if meets else None
            member = replace(
                _member(settings),
                store_port=external_store.port if external_store is not None else 0,
                local_rank=settings.local_rank,
                late=settings.late,
                guest=True,
            )
            channel.report(member=member, joined=True)
            channel.listen(guest.direct)
            if not guest.await_slot():
                raise Left(0)
            if external_store is not None:
                _external_stores.append(external_store)
                os.environ.update(guest.variables)
        process.activity.now(Phase.STARTING)
    elif abort is not None:
        guest.on_change(abort)
    if channel is not None and saves:
        channel.report(checkpoints=True)
    return guest


# A store lives as long as the process: a generation may rendezvous there at any time.
_stores: list[RendezvousStore] = []
_external_stores: list[ExternalStore] = []


def _member(settings: WorkerSettings) -> Member:
    # Which replica it belongs to is decided with each generation.
    slot = Slot(replica=-1, position=settings.position) if settings.replica_size > 1 else UNSET
    return Member(worker_id=settings.worker_id, host=settings.host, address=settings.address, slot=slot)
