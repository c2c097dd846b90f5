"""The rendezvous store: every member of a generation brings entries and receives those of all members.

It replaces torch's ``TCPStore``, which asks a name server for the name of every peer: with a slow name server each new
generation would take seconds.

Every worker runs the server end; rank 0's is used. A member connects, proves to have the job's key, sends its entries and
receives, once all members have arrived, the entries of all. Both ends bound what they read (``craft.wire.peer_server``).
"""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import time
from datetime import timedelta

import msgspec
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from craft.protocol.errors import SnapshotCorrupt
from craft.protocol.membership import Generation
from craft.wire import peers
from craft.wire.peer_server import PeerServer
from craft.wire.peers import Peer, PeerRefusal

_MAX_STRANGERS = 1024
"""All members of a large generation arrive at the same moment."""
_MAX_MEMBERS = 1 << 14
_MAX_BROUGHT_BYTES = 1 << 24
_MAX_BYTES = 1 << 28
_MAX_NAMED = 64
_LONGEST_WAIT_S = 600.0
_AGAIN_S = 0.05
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors that mean a transient shortage in this process or on its host."""


class Bring(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What one member brings. Its entries follow in frames."""

    number: int
    name: str
    """Name of the generation; its number alone may be that of one that a lost lighthouse had begun."""
    rank: int
    size: int
    limit_s: float
    """How long it waits for the others."""
    entries_bytes: int
    nonce: bytes


class Met(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All members arrived. The entries of all follow in frames."""

    entries_bytes: int


class NotMet(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Not all members arrived, or a newer generation has met."""

    reason: str
    missing: tuple[int, ...] = ()
    """Ranks that did not arrive; the first of them, if there are many."""


_BRING: msgspec.msgpack.Decoder[Bring] = msgspec.msgpack.Decoder(Bring)
_ANSWER: msgspec.msgpack.Decoder[Met | NotMet | PeerRefusal] = msgspec.msgpack.Decoder(Met | NotMet | PeerRefusal)
_ENTRIES: msgspec.msgpack.Decoder[dict[str, bytes]] = msgspec.msgpack.Decoder(dict[str, bytes])


class _Gathering:
    """The members of one generation that have arrived."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.brought: dict[int, dict[str, bytes]] = {}
        self.outdated = False


class RendezvousStore:
    """The server end. Lives as long as the process: a generation may meet there at any time."""

    def __init__(self, address: str, key: bytes) -> None:
        # Guards the gatherings: one thread serves each member.
        self._change = threading.Condition()
        self._gatherings: dict[str, _Gathering] = {}
        self._newest = 0
        """The newest generation that has met here."""
        self._server = PeerServer(
            address, key, self._serve, name="store", max_strangers=_MAX_STRANGERS, max_peers=_MAX_MEMBERS
        )
        self.port = self._server.port

    def _serve(self, peer: Peer) -> None:
        bring = _BRING.decode(peer.request)
        if not (0 <= bring.rank < bring.size <= _MAX_MEMBERS and 0 <= bring.entries_bytes <= _MAX_BROUGHT_BYTES):
            raise msgspec.DecodeError(f"no member brings {bring.entries_bytes} bytes as {bring.rank} of {bring.size}")
        entries = _ENTRIES.decode(peers.receive_frames(peer.connection, peer.body, bring.entries_bytes, "a member"))
        found = self._gather(bring, entries)
        if isinstance(found, NotMet):
            peer.answer(found)
            return
        data = msgspec.msgpack.encode(found)
        peer.answer(Met(len(data)))
        peers.send_frames(peer.connection, peer.answers, memoryview(data))

    def _gather(self, bring: Bring, entries: dict[str, bytes]) -> dict[str, bytes] | NotMet:
        """Wait until all members of the generation have brought their entries, or a newer generation has met."""
        with self._change:
            if bring.number < self._newest:
                return _outdated(bring)
            gathering = self._gatherings.setdefault(bring.name, _Gathering(bring.number))
            gathering.brought[bring.rank] = entries
            if len(gathering.brought) == bring.size:
                self._met(bring.number)
            self._change.notify_all()
            self._change.wait_for(
                lambda: len(gathering.brought) >= bring.size or gathering.outdated, min(bring.limit_s, _LONGEST_WAIT_S)
            )
            if len(gathering.brought) >= bring.size:
                return {key: value for each in gathering.brought.values() for key, value in each.items()}
            if gathering.outdated:
                return _outdated(bring)
            missing = tuple(rank for rank in range(bring.size) if rank not in gathering.brought)
            return NotMet(f"{len(missing)} of {bring.size} members did not arrive", missing[:_MAX_NAMED])

    def _met(self, number: int) -> None:
        """Fail those who wait for an older generation: rank 0, whose store this is, has moved on."""
        self._newest = number
        for name, gathering in list(self._gatherings.items()):
            if gathering.number < number:
                gathering.outdated = True
                del self._gatherings[name]


def _outdated(bring: Bring) -> NotMet:
    return NotMet(f"generation {bring.number} is outdated: a newer one has met")


class Rendezvous(TorchStore):
    """The client end, as the store that Gloo expects: ``set`` entries, and the first ``wait`` exchanges them.

    Set everything before that: there is one exchange, not one per key.
    """

    def __init__(self, generation: Generation, rank: int, key: bytes, limit_s: float) -> None:
        super().__init__()
        peers.check_key(key)
        self._generation = generation
        self._rank = rank
        self._key = key
        self._limit_s = limit_s
        self._own: dict[str, bytes] = {}
        self._all: dict[str, bytes] | None = None
        self.missed: tuple[int, ...] = ()
        """After an error: the ranks that kept the members from meeting, as far as known; perhaps this one."""

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
        """Connect to the store of rank 0; retry if the connection ends before the store answers."""
        deadline = time.monotonic() + self._limit_s
        leader = self._generation.members[0]
        while True:
            try:
                return self._visit((leader.address, leader.store_port), deadline)
            except (OSError, EOFError, SnapshotCorrupt, msgspec.MsgspecError) as error:
                if isinstance(error, _NotMet):
                    raise
                passing = isinstance(error, OSError) and error.errno in _PASSING
                again = passing or isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
                if again and time.monotonic() + _AGAIN_S < deadline:
                    time.sleep(_AGAIN_S)
                    continue
                self.missed = (self._rank,) if passing else (0,)
                why = "it did not answer" if isinstance(error, BlockingIOError) else str(error)
                raise OSError(f"cannot use the rendezvous store of {leader.worker_id}: {why}") from None

    def _visit(self, place: tuple[str, int], deadline: float) -> dict[str, bytes]:
        left = max(_AGAIN_S, deadline - time.monotonic())
        entries = msgspec.msgpack.encode(self._own)
        bring = Bring(
            number=self._generation.number,
            name=self._generation.name,
            rank=self._rank,
            size=len(self._generation.members),
            limit_s=left,
            entries_bytes=len(entries),
            nonce=secrets.token_bytes(16),
        )
        with socket.create_connection(place, left) as connection:
            peers.prepare(connection)
            # The store keeps the limit; this one is for a store that does not answer at all.
            peers.limit(connection, left + 1.0)
            peer = peers.introduce(connection, msgspec.msgpack.encode(bring), self._key)
            peers.send_frames(connection, peer.body, memoryview(entries))
            address = f"{place[0]}:{place[1]}"
            answer = _ANSWER.decode(peer.read_answer(address))
            if isinstance(answer, Met) and answer.entries_bytes <= _MAX_BYTES:
                return _ENTRIES.decode(peers.receive_frames(connection, peer.answers, answer.entries_bytes, address))
        raise self._explained(answer)

    def _explained(self, answer: Met | NotMet | PeerRefusal) -> _NotMet:
        """Explain why the store returns no entries, and name the missing workers."""
        if isinstance(answer, Met):
            return _NotMet(f"the members brought {answer.entries_bytes} bytes: the limit is {_MAX_BYTES}")
        self.missed = answer.missing if isinstance(answer, NotMet) else ()
        members = self._generation.members
        who = ", ".join(members[rank].worker_id for rank in self.missed if rank < len(members))
        return _NotMet(answer.reason + (f": {who}" if who else ""))


class _NotMet(OSError):
    """The store answered that the members do not meet."""
