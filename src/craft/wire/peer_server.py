"""The server end of connections between workers: it serves only peers that prove to have the job's key.

For each authenticated connection it calls ``serve`` with the request (``Peer``), on a thread of that connection. Limits keep
unauthenticated connections from exhausting threads and files. Donors and rendezvous stores build on it.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from craft.protocol.errors import SnapshotCorrupt
from craft.telemetry.fault_points import reach
from craft.wire import peers
from craft.wire.accept_errors import ADVICE
from craft.wire.peers import Peer, PeerRefusal

logger = logging.getLogger(__name__)

_HELLO_S = 5.0
"""How long a connection has to prove that it has the key."""
_SILENCE_S = 60.0
"""How long a peer may make no progress before the connection is closed."""
_PART_OF_FILES = 8
"""Unauthenticated connections get at most this fraction of the process's open files."""
_AGAIN_S = 0.2
"""Pause after a failed accept, for example because of too many open files."""
_BACKLOG = 1024


class PeerServer:
    """Listens on ``address``, on a free port; ``key`` is the job's, of 32 bytes."""

    def __init__(
        self, address: str, key: bytes, serve: Callable[[Peer], None], *, name: str, max_strangers: int, max_peers: int
    ) -> None:
        """``serve`` answers one request, then the connection ends. ``name`` appears in threads, logs and fault points.

        ``max_strangers`` limits unauthenticated connections; the oldest makes way for a new one.
        """
        peers.check_key(key)
        self._key = key
        self._serve = serve
        self._name = name
        self._max_peers = max_peers
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_strangers = max(1, min(max_strangers, files // _PART_OF_FILES))
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        self.port = int(self._socket.getsockname()[1])
        # Guards everything below: each connection has a thread, and so has accepting them.
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        """All connections, each with the thread that serves it. Two subsets are limited:"""
        self._strangers: dict[socket.socket, None] = {}
        self._peers: set[socket.socket] = set()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept_loop, name=f"craft-{name}", daemon=True)
        self._accepting.start()

    @property
    def num_strangers(self) -> int:
        """Connections that have not proved to have the key yet."""
        return len(self._strangers)

    @property
    def num_peers(self) -> int:
        """Connections that have, and are being served."""
        return len(self._peers)

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed = True
            threads = dict(self._threads)
            for connection in threads:
                _end(connection)
        # Wakes the thread that is blocked in accept; closing alone does not.
        _end(self._socket)
        self._accepting.join()
        self._socket.close()
        for thread in threads.values():
            thread.join()

    def release(self, peer: Peer) -> None:
        """Leave an authenticated connection to the caller, who closes it; to be called by ``serve``."""
        with self._lock:
            del self._threads[peer.connection]
            self._peers.discard(peer.connection)

    def _accept_loop(self) -> None:
        failing = False
        while True:
            try:
                reach(f"{self._name}.accept")
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                # Such as too many open files: transient, and must not end this thread.
                if not failing:
                    why = error.strerror or error
                    logger.error("the %s cannot accept connections, and retries: %s. %s", self._name, why, ADVICE)
                failing = True
                time.sleep(_AGAIN_S)
                continue
            if failing:
                failing = False
                logger.warning("the %s accepts connections again", self._name)
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._run, args=(connection,), name=f"craft-{self._name}-peer", daemon=True)
        with self._lock:
            if self._closed:
                connection.close()
                return
            if len(self._strangers) >= self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _end(oldest)
            self._strangers[connection] = None
            self._threads[connection] = thread
            try:
                thread.start()
            except RuntimeError as error:
                # The system is out of threads for now.
                logger.warning("the %s could not serve a connection: %s", self._name, error)
                del self._strangers[connection], self._threads[connection]
                connection.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            peers.prepare(connection)
            peer = self._welcome(connection)
            if peer is not None:
                self._serve(peer)
        except (OSError, EOFError, msgspec.MsgspecError, SnapshotCorrupt) as error:
            logger.info("a connection to the %s ended: %s", self._name, error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._peers.discard(connection)
                if self._threads.pop(connection, None) is not None:
                    # Under the lock: another thread may be about to shut it down, and its descriptor may be reused.
                    connection.close()

    def _welcome(self, connection: socket.socket) -> Peer | None:
        """Return the authenticated peer with its request; None, after telling it why, if it is not served."""
        deadline = time.monotonic() + _HELLO_S
        challenge = secrets.token_bytes(peers.CHALLENGE_BYTES)
        connection.sendall(challenge)
        size = peers.message_size(peers.receive_within(connection, peers.SIZE_BYTES, deadline))
        request = peers.receive_within(connection, size, deadline)
        tag = peers.receive_within(connection, peers.TAG_BYTES, deadline)
        peers.limit(connection, _SILENCE_S)
        peer = Peer(connection, self._key, challenge, request)
        if not peers.same_tag(tag, peers.request_tag(self._key, challenge, request)):
            # Sealed with this worker's key: a peer that has another key sees so from this answer.
            peer.answer(PeerRefusal("the request does not come from an owner of this job's key"))
            return None
        with self._lock:
            self._strangers.pop(connection, None)
            full = len(self._peers) >= self._max_peers
            if not full:
                self._peers.add(connection)
        if full:
            peer.answer(PeerRefusal(f"the {self._name} serves too many others at this time"))
            return None
        return peer


def _end(connection: socket.socket) -> None:
    """Wake the threads blocked on a connection; the thread that serves it closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
