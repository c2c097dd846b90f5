"""The rendezvous store: where the members of a generation bring what the others must know, and get what all brought.

It stands in for torch's ``TCPStore``, which asks a name server for the name of every peer. Where that is slow or silent,
each new generation would take seconds.

The server end lives in every worker; the one of rank 0 is used. A member connects, sends one ``Bring`` and gets, once all
members have, everybody's entries. Both ends bound what they read; nothing is authenticated, like all that Gloo does.
"""

from __future__ import annotations

import logging
import socket
import threading
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from craft.protocol.membership import Generation

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEADER_BYTES = 8
_MAX_BYTES = 1 << 28
_LONGEST_WAIT_S = 600.0


class Bring(msgspec.Struct, frozen=True, array_like=True):
    """What one member brings."""

    number: int
    name: str
    """Of the generation; its number alone may be that of one that a lost lighthouse had begun."""
    rank: int
    size: int
    limit_s: float
    """How long it will wait for the others."""
    entries: dict[str, bytes]


class _Gathering:
    """The members of one generation, as far as they are here."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.brought: dict[int, dict[str, bytes]] = {}
        self.outdated = False


class Store:
    """The server end. Lives as long as the process: a generation may be meeting there at any time."""

    def __init__(self, address: str) -> None:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(place[:2], family=family, backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        # Guards the gatherings: each member is served by a thread of its own.
        self._change = threading.Condition()
        self._gatherings: dict[str, _Gathering] = {}
        self._newest = 0
        """The newest generation that has met here."""
        threading.Thread(target=self._accept_loop, name="craft-store", daemon=True).start()

    def _accept_loop(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                logger.error("the rendezvous store takes no more members: %s", error)
                return
            threading.Thread(target=self._serve, args=(connection,), name="craft-store-member", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_LONGEST_WAIT_S)
                bring = _receive(connection, Bring)
                entries = self._gather(bring)
                if entries is not None:
                    _send(connection, entries)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                logger.info("a member left the rendezvous store: %s", error)

    def _gather(self, bring: Bring) -> dict[str, bytes] | None:
        """Wait until all members of the generation have brought their entries; None if that is of no use any more."""
        with self._change:
            if bring.number < self._newest:
                return None
            gathering = self._gatherings.setdefault(bring.name, _Gathering(bring.number))
            gathering.brought[bring.rank] = bring.entries
            if len(gathering.brought) == bring.size:
                self._met(bring.number)
            self._change.notify_all()
            self._change.wait_for(
                lambda: len(gathering.brought) >= bring.size or gathering.outdated, min(bring.limit_s, _LONGEST_WAIT_S)
            )
            if len(gathering.brought) < bring.size:
                return None
            return {key: value for entries in gathering.brought.values() for key, value in entries.items()}

    def _met(self, number: int) -> None:
        """Those who still wait for an older generation wait in vain: its rank 0, whose store this is, has moved on."""
        self._newest = number
        for name, gathering in list(self._gatherings.items()):
            if gathering.number < number:
                gathering.outdated = True
                del self._gatherings[name]


class Rendezvous(TorchStore):
    """A member's end, in the form that Gloo wants: ``set`` what you bring, and the first ``wait`` brings it.

    Everything must be set before that: there is one round trip, not one for each key.
    """

    def __init__(self, generation: Generation, rank: int, limit_s: float) -> None:
        super().__init__()
        self._generation = generation
        self._rank = rank
        self._limit_s = limit_s
        self._own: dict[str, bytes] = {}
        self._all: dict[str, bytes] | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._own[key] = bytes(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if self._all is None:
            self._all = self._meet()

    def get(self, key: str) -> bytes:
        self.wait([key])
        assert self._all is not None
        return self._all[key]

    def _meet(self) -> dict[str, bytes]:
        leader = self._generation.members[0]
        with socket.create_connection((leader.address, leader.store_port), self._limit_s) as connection:
            # The limit is the store's to keep; this one is for a store that does not answer at all.
            connection.settimeout(self._limit_s + 1.0)
            bring = Bring(
                number=self._generation.number,
                name=self._generation.name,
                rank=self._rank,
                size=len(self._generation.members),
                limit_s=self._limit_s,
                entries=self._own,
            )
            _send(connection, bring)
            try:
                return _receive(connection, dict[str, bytes])
            except EOFError:
                raise OSError("not every member came, or a newer generation was there first") from None


def _send(connection: socket.socket, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(_HEADER_BYTES, "little") + data)


def _receive(connection: socket.socket, kind: type[T]) -> T:
    size = int.from_bytes(_read(connection, _HEADER_BYTES), "little")
    if size > _MAX_BYTES:
        raise OSError(f"a message of {size} bytes is not one of ours")
    return msgspec.msgpack.decode(_read(connection, size), type=kind)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("connection closed")
        data += part
    return bytes(data)
