"""Fetch from donors: all stripes of a training state at once, for ``serialized.load``, or a small result."""

from __future__ import annotations

import contextlib
import errno
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from craft.protocol.errors import (
    BitsDiffer,
    ConfigError,
    SnapshotAborted,
    SnapshotCorrupt,
    SnapshotMissing,
    Unreachable,
)
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.state.serialized import Header
from craft.snapshots.transfer import protocol
from craft.snapshots.transfer.receive import Frame, StateReceiver
from craft.wire import peers

Place = tuple[str, int]

_LOOK_S = 0.02
"""How often to check whether the caller has cancelled."""
_MAX_HEADER_BYTES = 1 << 30
_MAX_RESULT_BYTES = 1 << 32
_ANSWER: msgspec.msgpack.Decoder[protocol.Answer] = msgspec.msgpack.Decoder(
    protocol.Stripe | protocol.Result | peers.PeerRefusal
)


class Fetched(NamedTuple):
    """A complete state. Tensors are in the order of the header's entries."""

    level: int
    header: Header
    tensors: list[torch.Tensor]


def fetch(
    places: Sequence[Place],
    name: str,
    key: bytes,
    *,
    cancelled: Callable[[], bool] | threading.Event,
    limit_s: float,
    modules: Mapping[str, torch.nn.Module] | None = None,
    reserve: Reserve | None = None,
    lanes: int = 1,
) -> Fetched:
    """Fetch the state staged under ``name``: stripe i from ``places[i]``, in parallel, each over ``lanes`` connections.

    Waits for donors that have not staged it yet. ``limit_s`` is the longest tolerated silence of a donor, not a limit on the
    transfer. Tensors of ``modules`` are received in place: after an error their content is undefined. The rest goes
    to the device it was on, or into memory of ``reserve``, if that suffices. Nothing is written once this has returned or raised.

    Raises SnapshotMissing, SnapshotCorrupt, Unreachable, BitsDiffer (donors hold different states), SnapshotAborted.
    """
    peers.check_key(key)
    if not places:
        raise SnapshotMissing(f"no worker has the state {name}")
    landing = StateReceiver(len(places), modules or {}, reserve, lanes)
    calls = _Calls(limit_s)
    for part, place in enumerate(places):
        for lane in range(lanes):
            request = protocol.StripeOf(name, part, len(places), secrets.token_bytes(16), lane, lanes)
            calls.start(place, _fetch_lane, place, request, key, landing)
    try:
        levels = calls.outcomes(cancelled)
    finally:
        landing.finish()
    if len(set(levels)) != 1:
        raise BitsDiffer(f"donors staged different steps under {name}: {levels[::lanes]}")
    return Fetched(levels[0], landing.header, landing.tensors)


def recall(
    place: Place, key_name: str, key: bytes, cancelled: Callable[[], bool] | threading.Event, limit_s: float
) -> bytes:
    """Fetch the result that the donor at ``place`` remembers under ``key_name``; wait until it exists."""
    peers.check_key(key)
    calls = _Calls(limit_s)
    calls.start(place, _fetch_result, place, protocol.ResultOf(key_name, secrets.token_bytes(16)), key)
    result: bytes = calls.outcomes(cancelled)[0]
    return result


def _fetch_lane(
    connection: socket.socket, place: Place, request: protocol.StripeOf, key: bytes, landing: StateReceiver
) -> int:
    seal, answer = _ask(connection, place, request, key)
    if (
        not isinstance(answer, protocol.Stripe)
        or answer.header_bytes > _MAX_HEADER_BYTES
        or answer.name != request.name
    ):
        raise SnapshotCorrupt(f"{_text(place)} answers something else than the stripe it was asked for", _text(place))
    if answer.frame_bytes not in (peers.FRAME_BYTES, protocol.LARGE_FRAME_BYTES):
        raise SnapshotCorrupt(f"{_text(place)} sends frames of {answer.frame_bytes} bytes", _text(place))
    header = peers.receive_frames(connection, seal, answer.header_bytes, _text(place))
    landing.open(header, answer.frame_bytes, _text(place))
    checks = _Checks(seal, _text(place))
    try:
        for frame in landing.frames(request.part, request.lane, answer.stripe_bytes, _text(place)):
            for piece in frame.pieces:
                peers.receive_into(connection, piece)
            checks.put(frame, peers.receive(connection, peers.TAG_BYTES))
    finally:
        checks.finish()
    checks.raise_error()
    return answer.level


class _Checks:
    """Checks frames on a thread while the next ones are received: both take about as long."""

    def __init__(self, seal: peers.Seal, address: str) -> None:
        self._seal = seal
        self._address = address
        self._frames: queue.SimpleQueue[tuple[Frame, bytes] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="craft-fetch-check", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (received := self._frames.get()) is not None:
            frame, tag = received
            try:
                self.raise_error()
                self._seal.check(peers.digest_of(*frame.pieces), tag, self._address)
                frame.put()
            except BaseException as error:  # noqa: BLE001  (the edge of a thread: the one that receives raises it)
                self._error = error
                frame.drop()

    def put(self, frame: Frame, tag: bytes) -> None:
        self.raise_error()
        self._frames.put((frame, tag))

    def finish(self) -> None:
        self._frames.put(None)
        self._thread.join()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _fetch_result(connection: socket.socket, place: Place, request: protocol.ResultOf, key: bytes) -> bytes:
    seal, answer = _ask(connection, place, request, key)
    if not isinstance(answer, protocol.Result) or answer.size > _MAX_RESULT_BYTES:
        raise SnapshotCorrupt(f"{_text(place)} answers something else than the result it was asked for", _text(place))
    return peers.receive_frames(connection, seal, answer.size, _text(place))


def _ask(
    connection: socket.socket, place: Place, request: protocol.Request, key: bytes
) -> tuple[peers.Seal, protocol.Answer]:
    """Make a request and return the answer, with the seal of what follows."""
    data = msgspec.msgpack.encode(request)
    if len(data) > peers.MAX_MESSAGE_BYTES:
        raise ConfigError(f"the name {request.name[:40]}... is too long to ask for")
    peer = peers.introduce(connection, data, key)
    try:
        answer = _ANSWER.decode(peer.read_answer(_text(place)))
    except BlockingIOError:
        raise SnapshotMissing(f"{_text(place)} has nothing under {request.name} yet", _text(place)) from None
    except msgspec.DecodeError as error:
        raise SnapshotCorrupt(f"{_text(place)} does not speak this protocol: {error}", _text(place)) from None
    if isinstance(answer, peers.PeerRefusal):
        raise SnapshotMissing(f"{_text(place)} does not give {request.name}: {answer.reason}", _text(place))
    return peer.answers, answer


class _Calls:
    """Parallel connections, each with a thread; the first that fails, or the caller, ends all."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._done: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()
        # Guards the two below. A thread may write into the caller's memory only while its connection is listed.
        self._lock = threading.Lock()
        self._connected: dict[threading.Thread, socket.socket] = {}
        self._over = False
        self._threads: list[threading.Thread] = []

    def start(self, place: Place, function: Callable[..., Any], *args: Any) -> None:
        number = len(self._threads)
        thread = threading.Thread(
            target=self._run, args=(number, place, function, args), name="craft-fetch", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def outcomes(self, cancelled: Callable[[], bool] | threading.Event) -> list[Any]:
        """Return the results of the calls in the order of their start, or raise the first error."""
        stop = cancelled.is_set if isinstance(cancelled, threading.Event) else cancelled
        results: dict[int, Any] = {}
        try:
            while len(results) < len(self._threads):
                if stop():
                    raise SnapshotAborted("the transfer is no longer needed")
                with contextlib.suppress(queue.Empty):
                    number, result, error = self._done.get(timeout=_LOOK_S)
                    if error is not None:
                        raise error
                    results[number] = result
        finally:
            self._end()
        return [results[number] for number in range(len(self._threads))]

    def _end(self) -> None:
        with self._lock:
            self._over = True
            connected = list(self._connected)
            for connection in self._connected.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        # The others have no connection, and will not get one: they hang in a silent name server.
        for thread in connected:
            thread.join()

    def _run(self, number: int, place: Place, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(self._connect(place), *args)
        except (OSError, EOFError) as reason:
            text = "it was silent for too long" if isinstance(reason, BlockingIOError) else str(reason)
            error = Unreachable(f"lost the donor at {_text(place)}: {text}", _text(place))
        except BaseException as reason:  # noqa: BLE001  (the edge of a thread: the caller raises it)
            error = reason
        self._disconnect()
        self._done.put((number, result, error))

    def _disconnect(self) -> None:
        with self._lock:
            connection = self._connected.pop(threading.current_thread(), None)
            if connection is not None:
                connection.close()

    def _connect(self, place: Place) -> socket.socket:
        family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            self._await(connection, connection.connect_ex(address))
            peers.prepare(connection)
            peers.limit(connection, self._limit_s)
            with self._lock:
                if self._over:
                    raise OSError("the transfer is no longer needed")
                self._connected[threading.current_thread()] = connection
        except BaseException:
            connection.close()
            raise
        return connection

    def _await(self, connection: socket.socket, status: int) -> None:
        """Wait for a connection, in short turns: a shutdown would not wake this thread."""
        deadline = time.monotonic() + self._limit_s
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while status == errno.EINPROGRESS and not self._over and time.monotonic() < deadline:
            if poll.poll(_LOOK_S * 1e3):
                status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, "no answer" if status == errno.EINPROGRESS else errno.errorcode.get(status, "failed"))


def _text(place: Place) -> str:
    return f"{place[0]}:{place[1]}"
