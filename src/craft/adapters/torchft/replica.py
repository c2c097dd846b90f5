"""``attend(manager)``: make a torchft replica an external worker of CRAFT.

torchft is unchanged. CRAFT wraps four methods of this manager, which show who waits for whom (``allreduce``, ``wait_quorum``),
which steps are committed (``should_commit``), and where a worker may leave (``start_quorum``). After a loss CRAFT aborts the
collective in flight and tells torchft's lighthouse through its proxy.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from craft.adapters.requirements import check_torchft
from craft.adapters.torchft import messages
from craft.adapters.torchft.messages import Attends, Gone
from craft.groups.sockets import abort_gloo
from craft.protocol.errors import ConfigError
from craft.settings.environ import torchft_lighthouse
from craft.worker.entry import join
from craft.worker.external.external_worker import Guest
from craft.worker.external.generation_follower import Change
from craft.worker.membership.client import Left

logger = logging.getLogger(__name__)

_LIMIT_S = 5.0
_GLOO = "torchft-gloo"


def attend(manager: Any, *, lighthouse: str | None = None) -> Guest:
    """Put a torchft ``Manager`` under CRAFT's active path; once per manager, before its first step.

    ``lighthouse``: its address, unless TORCHFT_LIGHTHOUSE names it. Outside of ``craft run`` torchft works as usual.
    """
    check_torchft()
    if manager._group_world_size != 1:
        raise ConfigError(
            f"this replica group of torchft has {manager._group_world_size} workers: under CRAFT a replica is one worker"
        )
    if join.connect() is None:
        return join.attend()
    address = lighthouse or torchft_lighthouse()
    if address is None:
        raise ConfigError(
            "where is torchft's lighthouse? Set TORCHFT_LIGHTHOUSE, or attend(manager, lighthouse=ADDRESS)"
        )
    door, guest = _ProxyClient(address), join.attend()

    def abort(change: Change) -> None:
        # In this order: the lighthouse admits no replica to a new quorum that has not left the old group.
        _abort_group(manager._pg)
        door.gone(guest.worker_id, change)

    guest.on_change(abort)
    door.attends(guest.worker_id, manager._store.get("replica_id").decode())
    _Managed(manager, guest)
    return guest


def _abort_group(group: Any) -> None:
    """Free calls that are blocked in the process group; torchft then sees an error, and skips the step."""
    if group.getBackendName() == _GLOO:
        abort_gloo()
    else:
        group.abort()


class _Managed:
    """The methods of a manager that CRAFT wraps."""

    def __init__(self, manager: Any, guest: Guest) -> None:
        self._guest = guest
        self._manager = manager
        self._start_quorum, self._wait_quorum = manager.start_quorum, manager.wait_quorum
        self._allreduce, self._should_commit = manager.allreduce, manager.should_commit
        manager.start_quorum, manager.wait_quorum = self.start_quorum, self.wait_quorum
        manager.allreduce, manager.should_commit = self.allreduce, self.should_commit

    def start_quorum(self, *args: Any, **more: Any) -> None:
        if self._guest.leaving is not None:
            logger.info("leaves before step %d: %s", self._manager.current_step(), self._guest.leaving)
            self._manager.shutdown(wait=False)
            raise Left(0)
        self._start_quorum(*args, **more)

    def wait_quorum(self) -> None:
        with self._guest.exchanging():
            self._wait_quorum()

    def allreduce(self, *args: Any, **more: Any) -> Any:
        work = self._allreduce(*args, **more)
        wait = work.wait

        def waiting(*args: Any, **more: Any) -> Any:
            with self._guest.exchanging():
                return wait(*args, **more)

        work.wait = waiting
        return work

    def should_commit(self, *args: Any, **more: Any) -> bool:
        committed: bool = self._should_commit(*args, **more)
        if committed:
            self._guest.step(self._manager.current_step())
        return committed


class _ProxyClient:
    """A worker's connection to the proxy of torchft's lighthouse."""

    def __init__(self, address: str) -> None:
        import grpc

        self._error = grpc.RpcError
        self._unknown = grpc.StatusCode.UNIMPLEMENTED
        self._address = address
        channel = grpc.insecure_channel(address.partition("://")[2] or address)
        self._attend = channel.unary_unary(messages.ATTEND)
        self._gone = channel.unary_unary(messages.GONE)

    def attends(self, worker_id: str, replica_id: str) -> None:
        try:
            self._attend(
                msgspec.json.encode(Attends(worker_id=worker_id, replica_id=replica_id)),
                timeout=_LIMIT_S,
                wait_for_ready=True,
            )
        except self._error as error:
            if error.code() is not self._unknown:
                raise ConfigError(
                    f"torchft's lighthouse at {self._address} does not answer: {error.details()}"
                ) from None
            logger.warning(
                "at %s is a plain torchft_lighthouse: it finds out itself who is gone, by its heartbeat limit. Start"
                " 'python -m craft.adapters.torchft.lighthouse' in its place, with the same flags", self._address,
            )  # fmt: skip

    def gone(self, worker_id: str, change: Change) -> None:
        said = Gone(worker_id=worker_id, generation=change.generation, worker_ids=change.lost)
        try:
            self._gone(msgspec.json.encode(said), timeout=_LIMIT_S)
        except self._error as error:
            if error.code() is not self._unknown:
                logger.warning("torchft's lighthouse at %s does not answer: %s", self._address, error.details())
