"""The Gloo group: ``torch.distributed.ProcessGroupGloo`` by its class, so that torch's default group stays the user's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed

from craft.groups import sockets
from craft.protocol.errors import GroupAborted, GroupBroken, GroupError, GroupTimeout
from craft.protocol.membership import Generation

# The names that torch does not export by type.
dist: Any = torch.distributed

# Waiting for a peer has no limit of its own: a slow step is not a fault, and whoever is lost is found by the lighthouse.
_NO_LIMIT = timedelta(days=30)
# Creating a device and finding its port among this process's sockets must not overlap with another group's.
_device_lock = threading.Lock()

_Answer: TypeAlias = "queue.SimpleQueue[GroupError | None]"


def host_store(address: str) -> Any:
    """Start the rendezvous store that this worker hosts for every generation in which it is rank 0."""
    # An open port says nothing about the interface: the server listens on all of them.
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))


class GlooGroup:
    """One generation's Gloo connections, with an abort that works."""

    def __init__(self, generation: Generation, rank: int, address: str, open_timeout_s: float = 30.0) -> None:
        """Meet the other members; blocks until all are here. Raises GroupError if that fails."""
        self.generation = generation.number
        self.rank = rank
        self.size = len(generation.members)
        self._aborted = threading.Event()
        # Guards ``_connections`` and ``_answers``: abort() may be called by any thread, also while open() is under way.
        self._lock = threading.Lock()
        self._connections: list[Any] = []
        self._answers: set[_Answer] = set()
        self._questions: queue.SimpleQueue[tuple[list[_GlooPending], _Answer] | None] = queue.SimpleQueue()
        limit = timedelta(seconds=open_timeout_s)
        try:
            self._open(generation, address, limit)
        except (RuntimeError, OSError) as error:
            raise GroupTimeout(f"generation {generation.number} did not meet: {error}", self.generation) from error

    def _open(self, generation: Generation, address: str, limit: timedelta) -> None:
        leader = generation.members[0]
        # A client of its own: a shared one would wait for the store calls of an opening that hangs.
        client = dist.TCPStore(leader.address, leader.store_port, wait_for_workers=False, timeout=limit)
        store = dist.PrefixStore(f"craft/{generation.name}", client)
        device, (host, port) = _device(address)
        store.set(f"address/{self.rank}", f"{host} {port}")
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = limit
        options._threads = 1
        self._gloo = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        published = [value.decode().split(" ") for value in store.multi_get([f"address/{r}" for r in range(self.size)])]
        others = {(peer_host, int(peer_port)) for peer_host, peer_port in published} - {(host, port)}
        found = sockets.connections(port, others)
        with self._lock:
            self._connections = found
        threading.Thread(target=self._wait_loop, name=f"craft-wait-{self.generation}", daemon=True).start()
        if self._aborted.is_set():
            self.abort()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _GlooPending:
        return self._start(lambda gloo: gloo.send([tensor], peer, tag), peer)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> _GlooPending:
        return self._start(lambda gloo: gloo.recv([tensor], peer, tag), peer)

    def all_reduce(self, tensor: torch.Tensor) -> _GlooPending:
        options = dist.AllreduceOptions()
        options.timeout = _NO_LIMIT
        return self._start(lambda gloo: gloo.allreduce([tensor], options), -1)

    def _start(self, call: Callable[[Any], Any], peer: int) -> _GlooPending:
        gloo = self._gloo
        if gloo is None:
            raise self._gone()
        try:
            return _GlooPending(self, call(gloo), peer)
        except RuntimeError as error:
            raise self.error(error, peer) from error

    def wait_all(self, pending: Sequence[_GlooPending]) -> None:
        if not pending:
            return
        answer: _Answer = queue.SimpleQueue()
        with self._lock:
            if self._aborted.is_set():
                raise self._gone()
            self._answers.add(answer)
        self._questions.put((list(pending), answer))
        error = answer.get()
        with self._lock:
            self._answers.discard(answer)
        if error is not None:
            raise error

    def _wait_loop(self) -> None:
        """Wait in Gloo for whoever calls ``wait_all``.

        Gloo forgets an operation that was half done when its connection ended: nothing ever frees who waits for it. So it
        is this thread that waits, and that is left behind then, with the group.
        """
        while (question := self._questions.get()) is not None:
            pending, answer = question
            error = None
            for each in pending:
                error = error or each.finish()
            answer.put(error)
        # Here, because the end of a group waits for its own threads, one of which may hang in the same way.
        self._gloo = None

    def _gone(self) -> GroupAborted:
        return GroupAborted(f"generation {self.generation} was aborted", self.generation)

    def error(self, error: RuntimeError, peer: int) -> GroupAborted | GroupBroken:
        """Map what torch raised to the tree of errors."""
        if self._aborted.is_set():
            return self._gone()
        first_line = str(error).partition("\n")[0]
        return GroupBroken(f"generation {self.generation}: rank {peer}: {first_line}", self.generation, peer)

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        with self._lock:
            self._aborted.set()
            found, self._connections = self._connections, []
            answers, self._answers = self._answers, set()
        sockets.cut(found)
        for answer in answers:
            answer.put(self._gone())
        self._questions.put(None)

    def close(self) -> None:
        self.abort()


class _GlooPending:
    def __init__(self, group: GlooGroup, work: Any, peer: int) -> None:
        self._group = group
        self._work = work
        self._peer = peer

    def wait(self) -> None:
        self._group.wait_all([self])

    def finish(self) -> GroupError | None:
        """Block until Gloo is done with it, if ever; return what went wrong. On the waiting thread only."""
        # Gloo hands a completion out once: a second wait on the same operation would block for ever.
        work, self._work = self._work, None
        if work is None:
            return None
        try:
            work.wait(_NO_LIMIT)
        except RuntimeError as error:
            return self._group.error(error, self._peer)
        return None


def _device(address: str) -> tuple[Any, tuple[str, int]]:
    """Create a Gloo device and tell where it listens, in numbers: ``address`` may be a name, connections know none."""
    with _device_lock:
        before = sockets.listening_addresses()
        device = dist.ProcessGroupGloo.create_device(hostname=address)
        new = sockets.listening_addresses() - before
    if len(new) != 1:
        raise OSError(f"expected one new listening socket of Gloo's, found {sorted(new)}")
    return device, new.pop()
