"""Gloo groups between real processes, some of which are killed, stopped, silent or never there."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from .cast import AT_ONCE_S, LIMIT_S, Actor, Cast, generation_of, open_group


def opened(number: int, actors: list[Actor], address: str = "127.0.0.1") -> None:
    outcomes = open_group(number, actors, address)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(len(actors), "")] * len(actors)


def all_reduce(number: int, actors: list[Actor]) -> None:
    for rank, actor in enumerate(actors):
        actor.tell("all_reduce", number, [float(rank), 1.0])
    total = [float(sum(range(len(actors)))), float(len(actors))]
    assert [actor.answer().value for actor in actors] == [total] * len(actors)


def test_members_send_receive_and_sum(cast: Cast) -> None:
    actors = cast.actors(3)
    opened(1, actors)

    actors[2].tell("send", 1, [1.5, -2.5], 0, 7)
    assert actors[0].ask("recv", 1, 2, 2, 7).value == [1.5, -2.5]
    assert actors[2].answer().error == ""
    all_reduce(1, actors)


def test_what_is_summed_keeps_its_type(cast: Cast) -> None:
    actors = cast.actors(2)
    opened(1, actors)

    for dtype, values in (("uint8", [1, 127]), ("int64", [2**40, -1]), ("float64", [0.1, 0.2])):
        for actor in actors:
            actor.tell("all_reduce", 1, values, dtype)
        assert [actor.answer().value for actor in actors] == [[2 * value for value in values]] * 2


def test_tags_keep_messages_apart_and_a_second_wait_returns_at_once(cast: Cast) -> None:
    sender, receiver = cast.actors(2)
    opened(1, [sender, receiver])

    receiver.tell("recv_in_reverse", 1, [5, 6, 7], 0)
    for tag in (7, 5, 6):
        assert sender.ask("send", 1, [float(tag)], 1, tag).error == ""
    assert receiver.answer().value == [5.0, 6.0, 7.0]


def test_several_generations_are_open_side_by_side(cast: Cast) -> None:
    actors = cast.actors(2)
    opened(1, actors)
    opened(2, actors)

    actors[0].ask("close", 1)

    all_reduce(2, actors)
    assert actors[1].ask("all_reduce", 1, [1.0]).error == "GroupBroken"


BLOCKED_CALLS = {
    "recv": ("recv", 1, 4, 1, 0),
    "all_reduce": ("all_reduce", 1, [1.0]),
    # More than all buffers of a connection hold, and not so much that it takes a busy machine seconds to make it.
    "send": ("send_much", 1, 1 << 26, 1),
}


@pytest.mark.parametrize("call", BLOCKED_CALLS)
@pytest.mark.parametrize("fate", ["stopped", "silent"])
def test_abort_frees_whoever_waits_for_a_peer_that_does_not_answer(cast: Cast, fate: str, call: str) -> None:
    """P5: nothing tells a stopped or unreachable process from a slow one; the abort must do without its help."""
    waiting, peer = cast.actors(2)
    opened(1, [waiting, peer])
    if fate == "stopped":
        peer.stop()

    waiting.ask("begin", "blocked", *BLOCKED_CALLS[call])
    assert waiting.ask("running", "blocked").value is True
    assert waiting.ask("abort", 1).took_s < AT_ONCE_S

    outcome = waiting.ask("end", "blocked", AT_ONCE_S)
    assert (outcome.error, outcome.generation) == ("GroupAborted", 1)
    assert outcome.message == "generation 1 was aborted"


@pytest.mark.parametrize("call", BLOCKED_CALLS)
def test_a_killed_peer_frees_whoever_waits_for_it(cast: Cast, call: str) -> None:
    """P5: a crash shows at once, without anybody's abort."""
    waiting, peer = cast.actors(2)
    opened(1, [waiting, peer])
    waiting.ask("begin", "blocked", *BLOCKED_CALLS[call])

    peer.kill()

    outcome = waiting.ask("end", "blocked", AT_ONCE_S)
    assert (outcome.error, outcome.generation) == ("GroupBroken", 1)
    assert outcome.peer == (-1 if call == "all_reduce" else 1)
    assert waiting.ask("abort", 1, 2).error == ""
    assert waiting.ask("recv", 1, 1, 1, 1).error == "GroupAborted"


def test_an_abort_frees_the_peers_too(cast: Cast) -> None:
    aborting, waiting, bystander = cast.actors(3)
    opened(1, [aborting, waiting, bystander])
    waiting.ask("begin", "blocked", "recv", 1, 1, 0, 0)

    aborting.ask("abort", 1)

    outcome = waiting.ask("end", "blocked", AT_ONCE_S)
    assert (outcome.error, outcome.peer) == ("GroupBroken", 0)


def test_several_threads_may_abort_at_once_and_again(cast: Cast) -> None:
    waiting, peer = cast.actors(2)
    opened(1, [waiting, peer])
    waiting.ask("begin", "blocked", "recv", 1, 1, 1, 0)

    assert waiting.ask("abort", 1, 8).took_s < AT_ONCE_S
    assert waiting.ask("abort", 1, 8).took_s < AT_ONCE_S

    assert waiting.ask("end", "blocked", AT_ONCE_S).error == "GroupAborted"


def test_after_an_abort_every_call_says_so(cast: Cast) -> None:
    actors = cast.actors(2)
    opened(1, actors)
    actors[0].ask("abort", 1)

    for call in (("send", 1, [1.0], 1, 0), ("recv", 1, 1, 1, 0), ("all_reduce", 1, [1.0])):
        outcome = actors[0].ask(*call)
        assert (outcome.error, outcome.took_s < AT_ONCE_S) == ("GroupAborted", True)


def test_survivors_of_an_abort_meet_again_at_once(cast: Cast) -> None:
    actors = cast.actors(3)
    opened(1, actors)
    actors[2].stop()
    actors[0].ask("abort", 1)
    actors[1].ask("abort", 1)

    outcomes = open_group(2, actors[:2])

    assert all(outcome.took_s < cast.opens_s for outcome in outcomes)
    all_reduce(2, actors[:2])


def test_an_address_may_be_a_host_name(cast: Cast) -> None:
    """The connections to be cut are known by numbers; a name must come to the same."""
    waiting, peer = cast.actors(2)
    for actors in ([waiting, peer], [peer, waiting]):
        number = 1 if actors[0] is waiting else 2
        opened(number, actors, "localhost")
        peer_rank = actors.index(peer)
        waiting.ask("begin", "blocked", "recv", number, 1, peer_rank, 0)

        waiting.ask("abort", number)

        assert waiting.ask("end", "blocked", AT_ONCE_S).error == "GroupAborted"


def test_an_opening_that_waits_for_a_missing_member_holds_up_no_other(cast: Cast) -> None:
    actors = cast.actors(2)
    hopeless = generation_of(1, actors, extra=1)
    for rank, actor in enumerate(actors):
        actor.ask("begin", "hopeless", "open", hopeless, rank, "127.0.0.1", LIMIT_S)

    outcomes = open_group(2, actors)

    assert [(outcome.error, outcome.took_s < cast.opens_s) for outcome in outcomes] == [("", True)] * 2, outcomes
    all_reduce(2, actors)
    assert [actor.ask("end", "hopeless", AT_ONCE_S).error for actor in actors] == ["GroupTimeout"] * 2


@pytest.mark.parametrize("first", ["the others wait already", "the others come later"])
def test_a_member_that_dies_after_it_told_its_address_holds_up_no_other_opening(cast: Cast, first: str) -> None:
    actors = cast.actors(3)
    survivors, dying = actors[:2], actors[2]
    waiting = first == "the others wait already"
    hopeless = generation_of(1, actors, extra=1 if waiting else 0)
    if waiting:
        for rank, actor in enumerate(survivors):
            actor.ask("begin", "hopeless", "open", hopeless, rank, "127.0.0.1", LIMIT_S)
    dying.ask("begin", "hopeless", "open", hopeless, 2, "127.0.0.1", LIMIT_S)
    assert actors[0].ask("await_member", hopeless.name, 2).error == ""
    dying.kill()
    if not waiting:
        for rank, actor in enumerate(survivors):
            actor.ask("begin", "hopeless", "open", hopeless, rank, "127.0.0.1", LIMIT_S)

    outcomes = open_group(2, survivors)

    assert [(outcome.error, outcome.took_s < cast.opens_s) for outcome in outcomes] == [("", True)] * 2, outcomes
    all_reduce(2, survivors)


def test_many_openings_that_hang_hold_up_no_other(cast: Cast) -> None:
    """A failure while one meets leads to the next generation, and another failure to the one after that."""
    actors = cast.actors(2)
    for number in range(1, 6):
        for rank, actor in enumerate(actors):
            hopeless = generation_of(number, actors, extra=1)
            actor.ask("begin", f"hopeless {number}", "open", hopeless, rank, "127.0.0.1", LIMIT_S)

    outcomes = open_group(6, actors)

    assert [(outcome.error, outcome.took_s < cast.opens_s) for outcome in outcomes] == [("", True)] * 2, outcomes
    all_reduce(6, actors)


def test_an_opening_ends_by_itself_when_its_limit_has_passed(cast: Cast) -> None:
    (actor,) = cast.actors(1)

    outcome = actor.ask("open", generation_of(1, [actor], extra=1), 0, "127.0.0.1", 0.2)

    assert (outcome.error, outcome.generation) == ("GroupTimeout", 1)
    assert outcome.message.startswith("generation 1 did not meet: ")


def test_a_store_that_nobody_hosts_is_a_group_error(cast: Cast) -> None:
    host, guest = cast.actors(2)
    generation = generation_of(1, [host, guest])
    host.kill()

    outcome = guest.ask("open", generation, 1, "127.0.0.1", LIMIT_S)

    assert (outcome.error, outcome.took_s < AT_ONCE_S) == ("GroupTimeout", True)


class Echo(threading.Thread):
    """Something that the script is connected to, and that has nothing to do with CRAFT."""

    def __init__(self) -> None:
        super().__init__()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(LIMIT_S)
        self.address = self._server.getsockname()
        self.start()

    def run(self) -> None:
        with self._server, self._server.accept()[0] as connection:
            connection.settimeout(LIMIT_S)
            while data := connection.recv(1024):
                connection.sendall(data)


def test_sockets_that_are_not_the_groups_survive_its_abort(cast: Cast, tmp_path: Path) -> None:
    """Those of the script, of torch's default group and of the rendezvous store."""
    actors = cast.actors(2)
    echo = Echo()
    opened(1, actors)
    actors[0].ask("connect", echo.address)
    for rank, actor in enumerate(actors):
        actor.tell("open_default_group", str(tmp_path / "store"), rank, 2)
    assert [actor.answer().error for actor in actors] == ["", ""]

    for actor in actors:
        actor.ask("abort", 1, 2)

    assert actors[0].ask("echo", b"still here").value == b"still here"
    for actor in actors:
        actor.tell("default_all_reduce", 1.0)
    assert [actor.answer().value for actor in actors] == [2.0, 2.0]
    opened(2, actors)
    opened(3, actors[::-1])
    for actor in actors:
        actor.kill()
    echo.join(LIMIT_S)
    assert not echo.is_alive()
