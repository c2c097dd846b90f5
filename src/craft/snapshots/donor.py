"""A donor: hands a stripe of this worker's training state to workers that join, while it goes on training.

Enters: ``stage`` on the main thread, at a step boundary; only its copy delays the step. Leaves: the staged bytes, to whoever
proves to have the job's key, on threads of its own. Small results that those who come later must have go the same way.
The worker owns one for the life of its process; ``fetch.py`` is the other end.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from craft.protocol.errors import ConfigError
from craft.snapshots import line
from craft.snapshots.device import Room
from craft.snapshots.memory import carve, room
from craft.snapshots.portable import State, encode_header, stripe_of
from craft.snapshots.reserve import Reserve
from craft.snapshots.staged import Staged

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HELLO_S = 5.0
_SILENCE_S = 60.0
"""How long somebody who fetches may take nothing before the connection is given up."""
_WAIT_S = 0.2
"""How often somebody who waits for what is not there yet is looked at, in case it left."""
_MAX_STRANGERS = 128
"""Connections that have not proved to have the key. When one more comes, the oldest goes."""
_MAX_GUESTS = 512
"""Connections that have."""
_GONE_NAMES = 64
_REQUEST: msgspec.msgpack.Decoder[line.Request] = msgspec.msgpack.Decoder(line.StripeOf | line.ResultOf)


class _Refused(Exception):
    """There is nothing to send, and will not be."""


class Donor:
    """Listens on ``address``, on a port of its own choice; ``key`` is the job's, of 32 bytes."""

    def __init__(self, address: str, key: bytes) -> None:
        line.check_key(key)
        self._key = key
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(place[:2], family=family, backlog=128)
        self.port = int(self._socket.getsockname()[1])
        # Guards everything below: the main thread stages, and each connection has a thread of its own.
        self._change = threading.Condition()
        self._staged: Staged | None = None
        self._gone: deque[str] = deque(maxlen=_GONE_NAMES)
        """Names that were staged and are not any more: nobody need wait for them."""
        self._results: dict[str, bytes] = {}
        self._lines: dict[socket.socket, threading.Thread] = {}
        """All connections, each with the thread that serves it. Two of its kinds are limited:"""
        self._strangers: dict[socket.socket, None] = {}
        self._guests: set[socket.socket] = set()
        self._closed = False
        self._reserved: Reserve | None = None
        self._last: Staged | None = None
        """What was staged last, where its memory stays. These two are the main thread's alone."""
        self._accepting = threading.Thread(target=self._accept_loop, name="craft-donor", daemon=True)
        self._accepting.start()

    # On the main thread.

    def stage(self, name: str, level: int, state: State, part: int, of: int) -> None:
        """Copy stripe ``part`` of ``of`` of ``state`` and serve it under ``name``; ``level`` is the step it belongs to."""
        if not 0 <= part < of:
            raise ConfigError(f"there is no stripe {part} of {of}")
        # First the old copy goes, or there would be two at a time.
        self.release()
        begin, end = stripe_of(state.header.total_bytes, part, of)
        memory = self._room(end - begin)
        stripe = carve(memory, 0, end - begin)
        state.copy(begin, end, stripe)
        large = bool(state.header.on_device)
        staged = Staged(name, level, part, of, encode_header(state.header), stripe, state.copied(), large=large)
        self._last = staged if memory.is_pinned else None
        with self._change:
            self._staged = staged
            self._change.notify_all()

    def _room(self, size: int) -> Room:
        """Memory for a stripe: what was set aside. Where it is pinned, which takes long, it stays for the next one."""
        last, self._last = self._last, None
        if last is not None:
            with self._change:
                in_use = last.num_served > 0
            if in_use:
                self._reserved = None
            else:
                last.end()
        memory = self._reserved.take(size) if self._reserved is not None else room(size)
        if not memory.is_pinned:
            self._reserved = None
        return memory

    def reserve(self, size: int) -> None:
        """Make room for a stripe of ``size`` bytes, in the background, so that the next ``stage`` only has to copy.

        The first touch of memory can cost more than the copy, and all of it would delay the step.
        """
        if self._reserved is None or self._reserved.size < size:
            self._reserved = Reserve(size)

    @property
    def prepared(self) -> bool:
        """Whether room that was asked for is there: until then ``stage`` would wait for it."""
        return self._reserved is None or self._reserved.is_there

    def release(self) -> None:
        """Drop the staged copy. Its memory goes when nobody is being served from it any more."""
        with self._change:
            if self._staged is not None:
                self._gone.append(self._staged.name)
            self._staged = None
            self._change.notify_all()

    def remember(self, key: str, data: bytes) -> None:
        """Keep a small result under ``key`` for those who come later."""
        with self._change:
            self._results[key] = data
            self._change.notify_all()

    def forget(self) -> None:
        """Drop all remembered results."""
        with self._change:
            self._results.clear()

    def close(self) -> None:
        """End all connections and threads; nothing is served afterwards."""
        with self._change:
            self._closed = True
            staged, self._staged = self._staged, None
            self._results.clear()
            lines = dict(self._lines)
            for connection in lines:
                _end(connection)
            self._change.notify_all()
        # Wakes the thread that is blocked in accept; closing alone would not.
        _end(self._socket)
        self._accepting.join()
        self._socket.close()
        if staged is not None:
            staged.end()
        for thread in lines.values():
            thread.join()

    # On threads of the donor.

    def _accept_loop(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                with self._change:
                    if self._closed:
                        return
                # Such as too many open files: it passes, and must not end the donor.
                logger.warning("a donor could not take a connection: %s", error)
                time.sleep(_WAIT_S)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="craft-donor-line", daemon=True)
        with self._change:
            if self._closed:
                connection.close()
                return
            if len(self._strangers) >= _MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _end(oldest)
            self._strangers[connection] = None
            self._lines[connection] = thread
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            line.prepare(connection)
            self._talk(connection)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            logger.info("a connection to a donor ended: %s", error)
        finally:
            with self._change:
                self._strangers.pop(connection, None)
                self._guests.discard(connection)
                del self._lines[connection]
                # Under the lock: another thread may be about to shut it down, and its number may be used again.
                connection.close()

    def _talk(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _HELLO_S
        challenge = secrets.token_bytes(line.CHALLENGE_BYTES)
        connection.sendall(challenge)
        size = line.message_size(line.receive_within(connection, line.SIZE_BYTES, deadline))
        data = line.receive_within(connection, size, deadline)
        tag = line.receive_within(connection, line.TAG_BYTES, deadline)
        line.limit(connection, _SILENCE_S)
        seal = line.Seal(self._key, challenge, data)
        if not line.same_tag(tag, line.request_tag(self._key, challenge, data)):
            # Sealed with this donor's key: to somebody who has another one, this very answer shows it.
            _answer(connection, seal, line.Refusal("the request does not come from an owner of this job's key"))
        elif not self._welcome(connection):
            _answer(connection, seal, line.Refusal("the donor serves too many others at this time"))
        else:
            self._answer_request(connection, seal, _REQUEST.decode(data))

    def _welcome(self, connection: socket.socket) -> bool:
        with self._change:
            self._strangers.pop(connection, None)
            if len(self._guests) >= _MAX_GUESTS:
                return False
            self._guests.add(connection)
            return True

    def _answer_request(self, connection: socket.socket, seal: line.Seal, request: line.Request) -> None:
        if isinstance(request, line.ResultOf):
            result = self._wait(connection, lambda: self._results.get(request.name))
            _answer(connection, seal, line.Result(len(result)))
            line.send_frames(connection, seal, memoryview(result))
            return
        try:
            found = self._wait(connection, lambda: self._take_up(request))
        except _Refused as reason:
            _answer(connection, seal, line.Refusal(str(reason)))
            return
        try:
            sizes = len(found.header), len(found.view), found.frame_bytes
            _answer(connection, seal, line.Stripe(found.name, found.level, *sizes))
            line.send_frames(connection, seal, memoryview(found.header))
            for begin in line.lane_of(len(found.view), found.frame_bytes, request.lane, request.lanes):
                line.send_frame(connection, found.frame(begin), seal.tag(found.digest(begin)))
        finally:
            with self._change:
                found.num_served -= 1

    def _take_up(self, request: line.StripeOf) -> Staged | None:
        """What is asked for, counted as being served, or None if it is not there yet."""
        if not 0 <= request.lane < request.lanes <= line.MAX_LANES:
            raise _Refused(f"there is no lane {request.lane} of {request.lanes}")
        staged = self._staged
        if staged is not None and staged.name == request.name:
            if (staged.part, staged.of) == (request.part, request.of):
                staged.num_served += 1
                return staged
            raise _Refused(f"the donor has stripe {staged.part} of {staged.of}, not {request.part} of {request.of}")
        if request.name in self._gone:
            raise _Refused("the donor does not have this state any more")
        return None

    def _wait(self, connection: socket.socket, find: Callable[[], T | None]) -> T:
        """Wait until ``find`` finds something, or the other side leaves."""
        with self._change:
            while (found := find()) is None:
                if self._closed:
                    raise EOFError("the donor is closed")
                self._change.wait(_WAIT_S)
                _check_waiting(connection)
            return found


def _answer(connection: socket.socket, seal: line.Seal, answer: line.Answer) -> None:
    data = msgspec.msgpack.encode(answer)
    line.send_message(connection, data, seal.tag(line.digest_of(data)))


def _check_waiting(connection: socket.socket) -> None:
    """Raise EOFError if whoever waits has left, or talks where it should listen."""
    with contextlib.suppress(BlockingIOError):
        if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
            raise EOFError("it left before there was anything for it")
        raise EOFError("it said more than one request")


def _end(connection: socket.socket) -> None:
    """Free whoever is blocked on a connection; its own thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
