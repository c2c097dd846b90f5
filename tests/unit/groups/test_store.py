"""The rendezvous store: all members get what all brought, and nobody waits for those who moved on."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable

import pytest

from craft.groups.store import Rendezvous, Store
from craft.protocol.membership import Generation, Member

from .cast import AT_ONCE_S, LIMIT_S


@pytest.fixture
def store() -> Store:
    return Store("127.0.0.1")


def generation_of(store: Store, number: int, size: int, nonce: str = "test") -> Generation:
    members = tuple(Member(worker_id=f"w{rank}", store_port=store.port) for rank in range(size))
    return Generation(number=number, nonce=nonce, members=members)


class Visitor(threading.Thread):
    """A member that brings one entry under its own name, and wants those of all."""

    def __init__(self, generation: Generation, rank: int, value: bytes, limit_s: float = LIMIT_S) -> None:
        super().__init__(daemon=True)
        self._rendezvous = Rendezvous(generation, rank, limit_s)
        self._rendezvous.set(f"entry/{rank}", value)
        self._size = len(generation.members)
        self.found: list[bytes] | str = "nothing yet"
        self.start()

    def run(self) -> None:
        try:
            self.found = [self._rendezvous.get(f"entry/{rank}") for rank in range(self._size)]
        except OSError as error:
            self.found = str(error)

    def outcome(self, limit_s: float = LIMIT_S) -> list[bytes] | str:
        self.join(limit_s)
        return self.found


def await_members(store: Store, generation: Generation, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while generation.name not in store._gatherings or len(store._gatherings[generation.name].brought) < count:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("size", [2, 5])
def test_everybody_gets_what_everybody_brought(store: Store, size: int) -> None:
    generation = generation_of(store, size, size)
    values = [bytes([rank]) * rank * 1000 for rank in range(size)]

    visitors = [Visitor(generation, rank, value) for rank, value in enumerate(values)]

    assert [visitor.outcome() for visitor in visitors] == [values] * size


def test_generations_of_one_number_but_different_lighthouses_do_not_mix(store: Store) -> None:
    left, right = generation_of(store, 10, 2, "a"), generation_of(store, 10, 2, "b")
    visitors = [Visitor(left, 0, b"a0"), Visitor(right, 1, b"b1"), Visitor(left, 1, b"a1"), Visitor(right, 0, b"b0")]

    found = [visitor.outcome() for visitor in visitors]

    assert found == [[b"a0", b"a1"], [b"b0", b"b1"], [b"a0", b"a1"], [b"b0", b"b1"]]


def test_who_waits_for_a_member_that_never_comes_gives_up_at_its_limit(store: Store) -> None:
    visitor = Visitor(generation_of(store, 20, 2), 0, b"", limit_s=0.1)

    assert visitor.outcome(AT_ONCE_S) == "not every member came, or a newer generation was there first"


def test_who_waits_for_an_old_generation_is_freed_by_a_newer_one(store: Store) -> None:
    old, new = generation_of(store, 30, 3), generation_of(store, 31, 2)
    waiting = Visitor(old, 0, b"")
    await_members(store, old, 1)

    visitors = [Visitor(new, rank, b"") for rank in range(2)]

    assert [visitor.outcome(AT_ONCE_S) for visitor in visitors] == [[b"", b""]] * 2
    assert waiting.outcome(AT_ONCE_S) == "not every member came, or a newer generation was there first"


def test_who_comes_for_an_old_generation_after_a_newer_one_met_is_sent_away(store: Store) -> None:
    new = generation_of(store, 36, 2)
    for visitor in [Visitor(new, rank, b"") for rank in range(2)]:
        visitor.outcome()

    late = Visitor(generation_of(store, 35, 2), 1, b"")

    assert late.outcome(AT_ONCE_S) == "not every member came, or a newer generation was there first"


def test_a_member_that_comes_again_brings_what_it_brought_last(store: Store) -> None:
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
    connection.sendall((1 << 40).to_bytes(8, "little") + b"x" * 100)


def another_message(connection: socket.socket) -> None:
    connection.sendall((1).to_bytes(8, "little") + b"\xc0")


def half(connection: socket.socket) -> None:
    connection.sendall((100).to_bytes(8, "little") + b"x" * 50)
    connection.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("say", [junk, too_much, another_message, half])
def test_strangers_are_shown_out_and_do_no_harm(store: Store, say: Callable[[socket.socket], None]) -> None:
    with socket.create_connection(("127.0.0.1", store.port), LIMIT_S) as connection:
        say(connection)
        # Perhaps it was not even read to its end.
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""

    test_everybody_gets_what_everybody_brought(store, 2)


def test_the_store_listens_on_its_own_address_alone(store: Store) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), LIMIT_S)


def test_a_store_may_be_hosted_under_a_name() -> None:
    store = Store("localhost")
    members = tuple(Member(worker_id=f"w{rank}", address="localhost", store_port=store.port) for rank in range(2))
    generation = Generation(number=1, nonce="name", members=members)

    visitors = [Visitor(generation, rank, b"%d" % rank) for rank in range(2)]

    assert [visitor.outcome() for visitor in visitors] == [[b"0", b"1"]] * 2
