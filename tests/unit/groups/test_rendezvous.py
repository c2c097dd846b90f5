"""The rendezvous store: all members get what all brought, and nobody waits for those who moved on."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from craft.groups.rendezvous import Bring, Rendezvous, RendezvousStore
from craft.protocol.membership import Generation, Member
from craft.telemetry import fault_points
from craft.testing import faults
from craft.wire import peers

from .cast import AT_ONCE_S, KEY, LIMIT_S

OTHER_KEY = bytes(32)


@pytest.fixture
def store() -> RendezvousStore:
    return RendezvousStore("127.0.0.1", KEY)


def generation_of(store: RendezvousStore, number: int, size: int, nonce: str = "test") -> Generation:
    members = tuple(Member(worker_id=f"w{rank}", store_port=store.port) for rank in range(size))
    return Generation(number=number, nonce=nonce, members=members)


class Visitor(threading.Thread):
    """A member that brings one entry under its own name, and wants those of all."""

    def __init__(
        self, generation: Generation, rank: int, value: bytes, limit_s: float = LIMIT_S, key: bytes = KEY
    ) -> None:
        super().__init__(daemon=True)
        self.rendezvous = Rendezvous(generation, rank, key, limit_s)
        self.rendezvous.set(f"entry/{rank}", value)
        self._size = len(generation.members)
        self.found: list[bytes] | str = "nothing yet"
        self.start()

    def run(self) -> None:
        try:
            self.found = [self.rendezvous.get(f"entry/{rank}") for rank in range(self._size)]
        except OSError as error:
            self.found = str(error)

    def outcome(self, limit_s: float = LIMIT_S) -> list[bytes] | str:
        self.join(limit_s)
        return self.found


def await_members(store: RendezvousStore, generation: Generation, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while generation.name not in store._gatherings or len(store._gatherings[generation.name].brought) < count:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("size", [2, 5])
def test_everybody_gets_what_everybody_brought(store: RendezvousStore, size: int) -> None:
    generation = generation_of(store, size, size)
    values = [bytes([rank]) * rank * 1000 for rank in range(size)]

    visitors = [Visitor(generation, rank, value) for rank, value in enumerate(values)]

    assert [visitor.outcome() for visitor in visitors] == [values] * size


def test_generations_of_one_number_but_different_lighthouses_do_not_mix(store: RendezvousStore) -> None:
    left, right = generation_of(store, 10, 2, "a"), generation_of(store, 10, 2, "b")
    visitors = [Visitor(left, 0, b"a0"), Visitor(right, 1, b"b1"), Visitor(left, 1, b"a1"), Visitor(right, 0, b"b0")]

    found = [visitor.outcome() for visitor in visitors]

    assert found == [[b"a0", b"a1"], [b"b0", b"b1"], [b"a0", b"a1"], [b"b0", b"b1"]]


def test_who_waits_for_a_member_that_never_comes_gives_up_at_its_limit(store: RendezvousStore) -> None:
    visitor = Visitor(generation_of(store, 20, 2), 0, b"", limit_s=0.1)

    assert visitor.outcome(AT_ONCE_S) == "1 of 2 members did not arrive: w1"
    assert visitor.rendezvous.missed == (1,)


def test_who_waits_for_an_old_generation_is_freed_by_a_newer_one(store: RendezvousStore) -> None:
    old, new = generation_of(store, 30, 3), generation_of(store, 31, 2)
    waiting = Visitor(old, 0, b"")
    await_members(store, old, 1)

    visitors = [Visitor(new, rank, b"") for rank in range(2)]

    assert [visitor.outcome(AT_ONCE_S) for visitor in visitors] == [[b"", b""]] * 2
    assert waiting.outcome(AT_ONCE_S) == "generation 30 is outdated: a newer one has met"


def test_who_comes_for_an_old_generation_after_a_newer_one_met_is_sent_away(store: RendezvousStore) -> None:
    new = generation_of(store, 36, 2)
    for visitor in [Visitor(new, rank, b"") for rank in range(2)]:
        visitor.outcome()

    late = Visitor(generation_of(store, 35, 2), 1, b"")

    assert late.outcome(AT_ONCE_S) == "generation 35 is outdated: a newer one has met"


def test_a_member_that_comes_again_brings_what_it_brought_last(store: RendezvousStore) -> None:
    generation = generation_of(store, 40, 2)
    Visitor(generation, 0, b"before")
    await_members(store, generation, 1)
    again = Visitor(generation, 0, b"after")
    deadline = time.monotonic() + LIMIT_S
    while store._gatherings[generation.name].brought[0] != {"entry/0": b"after"}:
        assert time.monotonic() < deadline

    other = Visitor(generation, 1, b"other")

    assert other.outcome() == again.outcome() == [b"after", b"other"]


def junk(connection: socket.socket) -> None:
    connection.sendall(random.Random(0).randbytes(1 << 16))


def too_much(connection: socket.socket) -> None:
    connection.sendall((1 << 31).to_bytes(4, "little") + b"x" * 100)


def half(connection: socket.socket) -> None:
    connection.sendall((100).to_bytes(4, "little") + b"x" * 50)
    connection.shutdown(socket.SHUT_WR)


def another_message(connection: socket.socket) -> None:
    """By an owner of the key, but none that a store knows."""
    peers.introduce(connection, b"\xc0", KEY)


def of_a_rank_that_is_not_there(connection: socket.socket) -> None:
    bring = Bring(number=1, name="1-x", rank=2, size=2, limit_s=0.1, entries_bytes=0, nonce=b"")
    peers.introduce(connection, msgspec.msgpack.encode(bring), KEY)


@pytest.mark.parametrize("say", [junk, too_much, half, another_message, of_a_rank_that_is_not_there])
def test_strangers_are_shown_out_and_do_no_harm(store: RendezvousStore, say: Callable[[socket.socket], None]) -> None:
    with socket.create_connection(("127.0.0.1", store.port), LIMIT_S) as connection:
        say(connection)
        # Perhaps it was not even read to its end.
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass

    test_everybody_gets_what_everybody_brought(store, 2)


def test_whoever_has_another_key_is_not_heard(store: RendezvousStore) -> None:
    """P6: not even with the number of a generation that is never to come."""
    for number in (3, 1 << 62):
        stranger = Visitor(generation_of(store, number, 1), 0, b"", limit_s=AT_ONCE_S, key=OTHER_KEY)
        assert "does not come from an owner of this job's key" in stranger.outcome()

    assert not store._gatherings
    test_everybody_gets_what_everybody_brought(store, 2)


def test_a_store_that_has_another_key_is_not_believed() -> None:
    """P6."""
    stranger = RendezvousStore("127.0.0.1", OTHER_KEY)
    visitor = Visitor(generation_of(stranger, 1, 1), 0, b"", limit_s=AT_ONCE_S)

    assert "does not come from an owner of this job's key" in visitor.outcome()
    assert visitor.rendezvous.missed == (0,)


def test_any_number_of_silent_strangers_keep_no_member_out(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._server, "_max_strangers", 20)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", store.port), LIMIT_S))
        test_everybody_gets_what_everybody_brought(store, 2)
        assert store._server.num_strangers <= 20


def test_a_member_that_is_sent_away_before_it_is_heard_comes_again(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is the oldest of too many strangers."""
    monkeypatch.setattr(store._server, "_max_strangers", 1)

    test_everybody_gets_what_everybody_brought(store, 5)


def test_the_store_takes_members_again_after_the_system_could_not(store: RendezvousStore) -> None:
    faults.arm([faults.PlacedFault(point="store.accept", kind="error", errno="EMFILE", seconds=1.0)])
    try:
        # The thread is in an accept that was not to fail.
        socket.create_connection(("127.0.0.1", store.port), LIMIT_S).close()
        test_everybody_gets_what_everybody_brought(store, 2)
    finally:
        fault_points.listen(None)


def test_a_member_without_files_waits_until_there_are_some(store: RendezvousStore) -> None:
    generation = generation_of(store, 50, 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    other = Visitor(generation, 0, b"0")
    await_members(store, generation, 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        short = Visitor(generation, 1, b"1", limit_s=0.2)
        assert "Too many open files" in short.outcome()
        assert short.rendezvous.missed == (1,)
        waiting = Visitor(generation, 1, b"1")
        waiting.join(0.2)
        assert waiting.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert waiting.outcome() == other.outcome() == [b"0", b"1"]


def test_the_store_listens_on_its_own_address_alone(store: RendezvousStore) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), LIMIT_S)


def test_a_store_may_be_hosted_under_a_name() -> None:
    store = RendezvousStore("localhost", KEY)
    members = tuple(Member(worker_id=f"w{rank}", address="localhost", store_port=store.port) for rank in range(2))
    generation = Generation(number=1, nonce="name", members=members)

    visitors = [Visitor(generation, rank, b"%d" % rank) for rank in range(2)]

    assert [visitor.outcome() for visitor in visitors] == [[b"0", b"1"]] * 2
