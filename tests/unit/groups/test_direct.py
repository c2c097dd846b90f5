"""The direct connection of two members: whole messages both ways, and an end that frees all who wait."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from craft.groups.direct import MAX_TAIL_BYTES, DirectConnection, DirectOpening
from craft.groups.gloo import GlooGroup
from craft.protocol.errors import GroupBroken
from craft.protocol.membership import Generation, Member

from .cast import AT_ONCE_S, KEY, LIMIT_S, Cast, generation_of, open_group

OTHER_KEY = bytes(32)
LARGE = 1 << 25
"""More than all buffers of a connection hold."""
TWO = Generation(number=3, nonce="test", members=(Member(worker_id="w0"), Member(worker_id="w1")))
KIND = 7


def broken(error: OSError) -> GroupBroken:
    return GroupBroken(str(error), 3, 1)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def pair(ends: tuple[socket.socket, socket.socket]) -> tuple[DirectConnection, DirectConnection]:
    one, other = ends
    return DirectConnection(one, broken), DirectConnection(other, broken)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def numbered(size: int, first: int = 0) -> bytes:
    return bytes((first + index) % 251 for index in range(251)) * (size // 251 + 1)


def exchange(end: DirectConnection, parts: list[bytes], tail: bytes, sizes: list[int]) -> tuple[list[bytes], bytes]:
    end.send(KIND, [memoryview(part) for part in parts], tail)
    found = [bytearray(size) for size in sizes]
    theirs = end.receive(KIND, [memoryview(each) for each in found])
    return [bytes(each) for each in found], bytes(theirs)


@pytest.mark.parametrize(
    ("sizes", "tail"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([0], 5, id="an empty part"),
        pytest.param([3, 0, 70_000], 300, id="small"),
        pytest.param([1] * 3000, 1, id="more parts than a call takes"),
        pytest.param([LARGE, 17, LARGE], 1 << 22, id="large"),
    ],
)
def test_both_ends_send_first_and_get_what_the_other_sent(
    pair: tuple[DirectConnection, DirectConnection], threads: ThreadPoolExecutor, sizes: list[int], tail: int
) -> None:
    """With messages larger than all buffers, two ends that only send would wait for each other for ever."""
    sent = [[numbered(size, 3 * rank)[:size] for size in sizes] for rank in (0, 1)]
    tails = [numbered(tail, rank)[:tail] for rank in (0, 1)]
    for _ in range(2):
        calls = [threads.submit(exchange, pair[rank], sent[rank], tails[rank], sizes) for rank in (0, 1)]
        found = [call.result(LIMIT_S) for call in calls]
        assert found == [(sent[1], tails[1]), (sent[0], tails[0])]


def test_a_message_may_come_before_the_one_before_it_is_read(pair: tuple[DirectConnection, DirectConnection]) -> None:
    quick, slow = pair
    slow.send(KIND, [], b"1")
    quick.send(KIND, [], b"a")
    assert quick.receive(KIND) == b"1"
    quick.send(KIND + 1, [], b"b")
    assert bytes(slow.receive(KIND) + slow.receive(KIND + 1)) == b"ab"


def await_blocked(call: Future[Any], end: DirectConnection) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not end._in_call.locked():
        assert not call.done() and time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("size", [10, LARGE], ids=["who receives", "who sends"])
@pytest.mark.parametrize("ending", ["here", "at the peer"])
def test_an_end_frees_both_sides_at_once_P5(
    pair: tuple[DirectConnection, DirectConnection], threads: ThreadPoolExecutor, size: int, ending: str
) -> None:
    call = threads.submit(exchange, pair[0], [bytes(size)], b"", [size])
    await_blocked(call, pair[0])

    began = time.monotonic()
    pair[0 if ending == "here" else 1].end()

    assert isinstance(call.exception(LIMIT_S), GroupBroken)
    assert time.monotonic() - began < AT_ONCE_S
    with pytest.raises(GroupBroken):
        # What was sent before the end may still arrive.
        _ = [exchange(pair[1], [bytes(size)], b"", [size]) for _ in range(2)]


def test_an_end_closes_the_descriptor_after_the_call_that_uses_it(
    ends: tuple[socket.socket, socket.socket], threads: ThreadPoolExecutor
) -> None:
    """Not during the call: the number may belong to another file a moment later."""
    one, idle = (DirectConnection(each, broken) for each in ends)
    call = threads.submit(one.receive, KIND)
    await_blocked(call, one)
    for _ in range(3):
        one.end()
        idle.end()

    assert isinstance(call.exception(LIMIT_S), GroupBroken)
    assert [each.fileno() for each in ends] == [-1, -1]
    with pytest.raises(GroupBroken):
        one.send(KIND)


HEADER = struct.Struct("<IIQ")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"", "the connection ended", id="nothing"),
        pytest.param(HEADER.pack(KIND, 5, 4)[:7], "the connection ended", id="half a header"),
        pytest.param(HEADER.pack(KIND, 5, 4) + b"abcd12", "the connection ended", id="half a tail"),
        pytest.param(HEADER.pack(KIND, MAX_TAIL_BYTES + 1, 4), "expected message 7", id="a tail over the limit"),
        pytest.param(HEADER.pack(KIND, 5, 1 << 62), "expected message 7 with 4", id="parts of another size"),
        pytest.param(HEADER.pack(KIND + 1, 5, 4), "received the header of message 8", id="another kind"),
    ],
)
def test_a_message_that_is_not_the_expected_one_breaks_the_group(
    ends: tuple[socket.socket, socket.socket], data: bytes, says: str
) -> None:
    one, peer = DirectConnection(ends[0], broken), ends[1]
    peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)

    with pytest.raises(GroupBroken, match=says):
        one.receive(KIND, [memoryview(bytearray(4))])


# Opening.


def opened(rank: int, place: str, key: bytes = KEY, generation: Generation = TWO, limit_s: float = LIMIT_S) -> str:
    """Let rank 1 connect to ``place``; return what it hears, or why it does not."""
    opening = DirectOpening(generation, rank, key, limit_s)
    try:
        with opening.connect(place) as connection:
            return connection.recv(16).decode()
    except OSError as error:
        return str(error)
    finally:
        opening.close()


@pytest.fixture
def listening() -> Iterator[tuple[DirectOpening, str]]:
    opening = DirectOpening(TWO, 0, KEY, LIMIT_S)
    yield opening, opening.listen("127.0.0.1")
    opening.close()


def stranger(place: str) -> socket.socket:
    host, port = place.split()
    return socket.create_connection((host, int(port)), LIMIT_S)


def test_strangers_do_not_take_the_place_of_the_peer_P6(
    listening: tuple[DirectOpening, str], threads: ThreadPoolExecutor
) -> None:
    opening, place = listening
    other = Generation(number=3, nonce="other", members=TWO.members)
    with stranger(place), stranger(place) as loud:
        loud.sendall(b"x" * 5000)
        assert "not come from an owner" in opened(1, place, OTHER_KEY)
        assert "no member of generation 3-other is expected" in opened(1, place, generation=other)
        call = threads.submit(opened, 1, place)
        with opening.connect("") as connection:
            connection.sendall(b"welcome")
            connection.shutdown(socket.SHUT_WR)
            assert call.result(LIMIT_S) == "welcome"
            assert "no member of generation 3-test is expected" in opened(1, place)


def test_a_server_without_the_key_is_not_taken_for_the_peer_P6() -> None:
    impostor = DirectOpening(TWO, 0, OTHER_KEY, LIMIT_S)
    try:
        assert "no direct connection to w0" in opened(1, impostor.listen("127.0.0.1"))
    finally:
        impostor.close()


def test_who_waits_for_a_peer_that_does_not_come_gives_up_in_time() -> None:
    opening = DirectOpening(TWO, 0, KEY, 0.2)
    place = opening.listen("127.0.0.1")
    with pytest.raises(OSError, match="no direct connection to w1: it did not connect in time"):
        opening.connect("")
    opening.close()
    assert "refused" in opened(1, place)


def test_who_connects_to_a_silent_peer_gives_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        assert "no direct connection to w0: it did not answer in time" in opened(1, f"{host} {port}", limit_s=0.2)


def test_who_is_sent_away_unheard_comes_again(threads: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        host, port = busy.getsockname()
        call = threads.submit(opened, 1, f"{host} {port}")
        for _ in range(3):
            busy.accept()[0].close()
    assert "no direct connection to w0" in call.result(LIMIT_S)


def test_a_peer_that_comes_when_its_place_is_given_up_is_let_go(listening: tuple[DirectOpening, str]) -> None:
    """It has been accepted, and is not waited for any more."""
    opening, place = listening
    late = DirectOpening(TWO, 1, KEY, LIMIT_S)
    with late.connect(place) as connection:
        opening.close()
        assert connection.recv(1) == b""


# As part of a group, between processes.


def swap(group: GlooGroup, size: int) -> bytes:
    """Exchange messages with the peer; return the first bytes of its message."""
    assert group.direct is not None
    theirs = bytearray(size)
    group.direct.send(KIND, [memoryview(bytes([group.rank]) * size)])
    group.direct.receive(KIND, [memoryview(theirs)])
    return bytes(theirs[:2])


def has_direct(group: GlooGroup) -> bool:
    return group.direct is not None


def cut(group: GlooGroup) -> bool:
    return group.cut_one()


def shut_gloo(group: GlooGroup) -> None:
    """As if only Gloo's connection were lost."""
    group._connections[0].shutdown(socket.SHUT_RDWR)


def test_two_members_have_a_direct_connection_and_three_have_none(cast: Cast) -> None:
    actors = cast.actors(3)
    assert [outcome.error for outcome in open_group(1, actors[:2]) + open_group(2, actors)] == [""] * 5
    assert [actor.ask("call", 1, has_direct).value for actor in actors[:2]] == [True, True]
    assert [actor.ask("call", 2, has_direct).value for actor in actors] == [False] * 3

    for actor in actors[:2]:
        actor.tell("call", 1, swap, LARGE)
    assert [actor.answer().value for actor in actors[:2]] == [b"\1\1", b"\0\0"]


FATES: dict[str, Callable[[Any], object]] = {
    "killed": lambda peer: peer.kill(),
    "aborts": lambda peer: peer.ask("abort", 1),
    "cut": lambda peer: peer.ask("call", 1, cut),
    "Gloo lost": lambda peer: peer.ask("call", 1, shut_gloo),
}


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("size", [10, LARGE], ids=["small", "large"])
def test_a_member_that_loses_its_peer_in_an_exchange_blames_it_P5(cast: Cast, fate: str, size: int) -> None:
    peer, waiting = cast.actors(2)
    open_group(1, [peer, waiting])
    waiting.ask("begin", "swap", "call", 1, swap, size)

    FATES[fate](peer)

    outcome = waiting.ask("end", "swap", LIMIT_S)
    assert (outcome.error, outcome.generation, outcome.peer) == ("GroupBroken", 1, 0)


@pytest.mark.parametrize("size", [10, LARGE], ids=["receives", "sends"])
def test_abort_frees_who_waits_for_a_stopped_peer_P5(cast: Cast, size: int) -> None:
    waiting, peer = cast.actors(2)
    open_group(1, [waiting, peer])
    peer.stop()
    waiting.ask("begin", "swap", "call", 1, swap, size)

    assert waiting.ask("abort", 1, 4).took_s < AT_ONCE_S

    assert waiting.ask("end", "swap", AT_ONCE_S).error == "GroupAborted"
    assert waiting.ask("call", 1, swap, size).error == "GroupAborted"


def test_a_group_whose_direct_connection_fails_does_not_open_and_names_the_peer(cast: Cast) -> None:
    first, second = cast.actors(2)
    generation = generation_of(1, [first, second])
    # It opens without one, as a member that stops in between does.
    second.tell("open", generation, 1, "127.0.0.1", LIMIT_S, False)
    outcome = first.ask("open", generation, 0, "127.0.0.1", 1.0)
    assert outcome.error == "GroupTimeout" and "no direct connection to w1" in outcome.message
    assert second.answer().error == ""
    assert second.ask("recv", 1, 1, 0, 0).error == "GroupBroken", "the other one hears of it"
