"""Check reports of agents before anything is derived from them."""

from __future__ import annotations

from msgspec import UNSET

from craft.control.core.worker_index import WorkerIndex
from craft.protocol.errors import MalformedMessage
from craft.protocol.membership import Member
from craft.protocol.messages import HostReport

MAX_NUMBER = 2**53
"""Steps and generations are far below this; a larger one is nonsense, and could not be sent on."""
MAX_NAME_CHARS = 200


def check(report: HostReport, index: WorkerIndex, replica_size: int = 1) -> None:
    """Raise MalformedMessage if ``report`` cannot be true."""
    _check_name(report.host, "$.host")
    mentioned: set[str] = set()
    for worker in report.workers:
        worker_id = worker.member.worker_id
        _check_name(worker_id, "$.workers[...].member.worker_id")
        _check_number(worker.generation, "$.workers[...].generation")
        _check_number(worker.step, "$.workers[...].step")
        if worker_id in mentioned:
            raise MalformedMessage(f"worker {worker_id} is listed twice", "$.workers[...].member.worker_id")
        mentioned.add(worker_id)
        _check_position(worker.member, replica_size)
        view = index.view(worker_id)
        if view is not None and view.standing in ("waiting", "member") and view.member.host != report.host:
            raise MalformedMessage(
                f"worker_id {worker_id} is in use on host {view.member.host}: ids must be unique over all hosts",
                "$.workers[...].member.worker_id",
            )
    for exited in report.exited:
        _check_name(exited.worker_id, "$.exited[...].worker_id")


def _check_name(name: str, where: str) -> None:
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise MalformedMessage(f"{where} must be 1 to {MAX_NAME_CHARS} printable characters", where)


def _check_position(member: Member, replica_size: int) -> None:
    """Refuse a worker of a host with another number of workers per replica."""
    where = "$.workers[...].member.slot"
    if (member.slot is UNSET) != (replica_size == 1):
        raise MalformedMessage(f"{member.worker_id}: this job has --workers-per-replica {replica_size}", where)
    if member.slot is not UNSET and not 0 <= member.slot.position < replica_size:
        raise MalformedMessage(f"{member.worker_id} has position {member.slot.position} of {replica_size}", where)


def _check_number(number: int, where: str) -> None:
    if not 0 <= number <= MAX_NUMBER:
        raise MalformedMessage(f"{where} must be between 0 and {MAX_NUMBER}, not {number}", where)
