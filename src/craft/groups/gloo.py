"""The Gloo group: uses ``torch.distributed.ProcessGroupGloo`` directly and leaves torch's default group to the user."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed

from craft.groups import sockets
from craft.groups.direct import DirectConnection, DirectOpening
from craft.groups.rendezvous import Rendezvous
from craft.protocol.errors import GroupAborted, GroupBroken, GroupError, GroupTimeout
from craft.protocol.membership import Generation

# Names for which torch has no types.
dist: Any = torch.distributed

# Waiting for a peer has no limit: a slow step is not a fault, and the lighthouse detects lost workers.
_NO_LIMIT = timedelta(days=30)
# Creating a device and finding its port among this process's sockets must not overlap with another group's opening.
_device_lock = threading.Lock()

# Gloo reports a closed connection within milliseconds, unless it closed in the middle of a message.
_HALF_DONE_S = 1.0

THREADS = "craft-group"
"""Prefix of the names of threads that wait in Gloo: one that returns while Python shuts down ends the process."""

_Answer: TypeAlias = "queue.SimpleQueue[GroupError | None]"


class GlooGroup:
    """One generation's Gloo connections, with an abort that works."""

    def __init__(
        self,
        generation: Generation,
        rank: int,
        address: str,
        key: bytes,
        open_timeout_s: float = 30.0,
        *,
        directly: bool = False,
    ) -> None:
        """Connect to the other members, which have the same ``key``; raise GroupTimeout if they do not all arrive in time.

        ``directly``, the same on all members: if they are two, they also get a direct connection.
        """
        self.generation = generation.number
        self.rank = rank
        self.size = len(generation.members)
        self.direct: DirectConnection | None = None
        self._aborted = threading.Event()
        # Guards the next three: any thread may call abort(), also while _open() runs.
        self._lock = threading.Lock()
        self._over: GroupError | None = None
        self._connections: list[Any] = []
        self._answers: set[_Answer] = set()
        self._questions: queue.SimpleQueue[tuple[list[_GlooPending], _Answer] | None] = queue.SimpleQueue()
        store = Rendezvous(generation, rank, key, open_timeout_s)
        opening = DirectOpening(generation, rank, key, open_timeout_s) if directly and self.size == 2 else None
        try:
            self._open(store, address, timedelta(seconds=open_timeout_s), opening)
        except (RuntimeError, OSError) as error:
            # The others must not wait for a member that failed when it was half connected.
            self.abort()
            missed = tuple(generation.members[each].worker_id for each in store.missed if each < self.size)
            message = f"generation {generation.number} did not meet: {error}"
            raise GroupTimeout(message, self.generation, missed) from error
        finally:
            if opening is not None:
                opening.close()

    def _open(self, store: Rendezvous, address: str, limit: timedelta, opening: DirectOpening | None) -> None:
        device, (host, port) = _device(address)
        store.set(f"address/{self.rank}", f"{host} {port}".encode())
        if opening is not None:
            with _device_lock:
                store.set(f"direct/{self.rank}", opening.listen(host).encode())
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = limit
        options._threads = 1
        self._gloo = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        published = [store.get(f"address/{rank}").decode().split(" ") for rank in range(self.size)]
        others = {(peer_host, int(peer_port)) for peer_host, peer_port in published} - {(host, port)}
        found = sockets.connections(port, others)
        with self._lock:
            self._connections = found
        for loop, name in ((self._wait_loop, THREADS), (self._watch_loop, "craft-watch")):
            threading.Thread(target=loop, name=f"{name}-{self.generation}", daemon=True).start()
        if opening is not None:
            self._connect(store, opening)
        if self._aborted.is_set():
            self.abort()

    def _connect(self, store: Rendezvous, opening: DirectOpening) -> None:
        peer = 1 - self.rank
        try:
            connection = opening.connect(store.get("direct/0").decode())
        except OSError:
            store.missed = (peer,)
            raise
        self.direct = DirectConnection(connection, lambda error: self.error(error, peer))

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
            if self._over is not None:
                raise self._over.with_traceback(None)
            self._answers.add(answer)
        self._questions.put((list(pending), answer))
        error = answer.get()
        with self._lock:
            self._answers.discard(answer)
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback refers to this frame, which must not refer to it in turn: that cycle would keep the receive
                # buffers until the garbage collector runs.
                del error, pending, answer

    def _wait_loop(self) -> None:
        """Wait in Gloo on behalf of ``wait_all``.

        Gloo forgets an operation that was half done when its connection ended, and never wakes its waiter. So this thread waits,
        and is abandoned with the group in that case.
        """
        while (question := self._questions.get()) is not None:
            pending, answer = question
            error = None
            for each in pending:
                error = error or each.finish()
            answer.put(error)
        # Here, because destroying a group joins its threads, one of which may hang in the same way.
        self._gloo = None

    def _watch_loop(self) -> None:
        """Fail waiters when a connection ends and Gloo does not report it."""
        poller = select.poll()
        with self._lock:
            for connection in self._connections:
                poller.register(connection, select.POLLRDHUP)
        # With a timeout, because after an abort the descriptors may be reused.
        while not self._aborted.is_set() and not poller.poll(1000):
            pass
        if not self._aborted.wait(_HALF_DONE_S):
            self._end(GroupBroken(f"generation {self.generation}: a connection ended", self.generation))

    def _end(self, error: GroupError) -> None:
        """Make all current and future waits raise ``error``."""
        with self._lock:
            self._over = error
            answers, self._answers = self._answers, set()
        for answer in answers:
            answer.put(error)
        if self.direct is not None:
            self.direct.end()

    def _gone(self) -> GroupAborted:
        return GroupAborted(f"generation {self.generation} was aborted", self.generation)

    def error(self, error: RuntimeError | OSError, peer: int) -> GroupAborted | GroupBroken:
        """Map an error of torch, or of the direct connection, to CRAFT's error tree."""
        if self._aborted.is_set():
            return self._gone()
        first_line = str(error).partition("\n")[0]
        return GroupBroken(f"generation {self.generation}: rank {peer}: {first_line}", self.generation, peer)

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    @property
    def over(self) -> GroupError | None:
        """Why waiting here is pointless; None while the group works."""
        with self._lock:
            return self._over

    def abort(self) -> None:
        self._aborted.set()
        with self._lock:
            found, self._connections = self._connections, []
        sockets.cut(found)
        self._end(self._gone())
        self._questions.put(None)

    def cut_one(self) -> bool:
        """Shut one connection down, as a network failure between two hosts would; False if none is left.

        There is one connection per peer, so that one peer is cut off. Which one is unknown: an accepted connection does not
        show the rank of its other end.
        """
        with self._lock:
            if not self._connections:
                return False
            # Not closed: the watching thread polls it, and abort() closes it with the others.
            sockets.shut(self._connections[-1])
        if self.direct is not None:
            # It leads to the same peer.
            self.direct.end()
        return True

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
        """Block until Gloo completes it, if ever; return the error. On the waiting thread only."""
        # Gloo delivers a completion once: a second wait on the same operation would block for ever.
        work, self._work = self._work, None
        if work is None:
            return None
        try:
            work.wait(_NO_LIMIT)
        except RuntimeError as error:
            return self._group.error(error, self._peer)
        return None


def _device(address: str) -> tuple[Any, tuple[str, int]]:
    """Create a Gloo device; return it with the numeric address that it listens on, since ``address`` may be a name."""
    with _device_lock:
        before = sockets.listening_addresses()
        device = dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        new = sockets.listening_addresses() - before
    if len(new) != 1:
        raise OSError(f"expected one new listening socket of Gloo, found {sorted(new)}")
    return device, new.pop()
