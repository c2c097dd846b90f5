"""Donors and who fetches from them: parallel, checked, and quick to come out of whatever goes wrong."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from craft.protocol.errors import (
    BitsDiffer,
    ConfigError,
    CraftError,
    SnapshotAborted,
    SnapshotCorrupt,
    SnapshotMissing,
    Unreachable,
)
from craft.snapshots import donor as donor_module
from craft.snapshots import line
from craft.snapshots.donor import Donor
from craft.snapshots.fetch import Fetched, fetch, recall
from craft.snapshots.memory import same_bits
from craft.snapshots.portable import State

from .travel import AT_ONCE_S, HERE, KEY, LIMIT_S, Registered, Relay, never

OTHER_KEY = bytes(32)


def state_of(*tensors: torch.Tensor, **plain: Any) -> State:
    return State({}, {"item": Registered({"tensors": list(tensors), **plain})}, b"")


def random_state(megabytes: int = 3) -> State:
    """Tensors that end in the middle of frames, small ones between them."""
    sizes = [(megabytes << 18) - 777, 1, 0, 3, 250_001]
    return state_of(*[torch.rand(size, generator=torch.Generator().manual_seed(size)) for size in sizes])


@pytest.fixture
def donors() -> Iterator[list[Donor]]:
    three = [Donor(HERE, KEY) for _ in range(3)]
    yield three
    for each in three:
        each.close()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("craft-donor", "craft-fetch"))
    ]


@pytest.fixture
def donor(donors: list[Donor]) -> Donor:
    return donors[0]


def get(*donors: Donor | tuple[str, int], name: str = "g", key: bytes = KEY, limit_s: float = LIMIT_S) -> Fetched:
    places = [each if isinstance(each, tuple) else (HERE, each.port) for each in donors]
    return fetch(places, name, key, cancelled=never, limit_s=limit_s)


def remembered(donor: Donor, name: str, key: bytes = KEY, limit_s: float = LIMIT_S) -> bytes:
    return recall((HERE, donor.port), name, key, never, limit_s)


def same(fetched: Fetched, state: State) -> bool:
    pairs = zip(fetched.tensors, state.tensors, strict=True)
    return fetched.header == state.header and all(same_bits(mine, theirs) for mine, theirs in pairs)


class Background(threading.Thread):
    """A call on a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.error: CraftError | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except CraftError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def outcome(self, limit_s: float = LIMIT_S) -> Any:
        self.join(limit_s)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < deadline, "it did not come"


@pytest.mark.parametrize("of", [1, 2, 3])
def test_stripes_of_several_donors_make_one_state(donors: list[Donor], of: int) -> None:
    state = random_state()
    for part in range(of):
        donors[part].stage("g", 41, state, part, of)

    fetched = get(*donors[:of])

    assert fetched.level == 41
    assert same(fetched, state)


@pytest.mark.parametrize("of", [1, 3])
def test_a_state_without_a_single_tensor_arrives(donors: list[Donor], of: int) -> None:
    state = state_of(count=3)
    for part in range(of):
        donors[part].stage("g", 0, state, part, of)

    assert get(*donors[:of]).header == state.header


def test_what_is_staged_is_the_state_of_that_moment(donor: Donor) -> None:
    tensor = torch.zeros(1000)
    donor.stage("g", 1, state_of(tensor), 0, 1)

    tensor += 1

    assert get(donor).tensors[0].sum() == 0


def test_room_that_was_reserved_is_used_and_too_little_of_it_does_no_harm(donor: Donor) -> None:
    state = random_state()
    for size in (state.header.total_bytes, state.header.total_bytes * 2, 1):
        donor.reserve(size)
        donor.stage("g", 1, state, 0, 1)
        assert same(get(donor), state)


def test_who_comes_before_it_is_staged_waits_for_it(donors: list[Donor]) -> None:
    state = random_state()
    fetching = Background(lambda: get(*donors[:2]))
    for part in range(2):
        wait_until(lambda part=part: len(donors[part]._guests) == 1)  # type: ignore[misc]
        donors[part].stage("g", 1, state, part, 2)

    assert same(fetching.outcome(), state)


def test_several_joiners_are_served_at_once(donor: Donor) -> None:
    state = random_state()
    fetching = [Background(lambda: get(donor)) for _ in range(4)]
    donor.stage("g", 1, state, 0, 1)

    assert all(same(each.outcome(), state) for each in fetching)


def test_who_is_in_the_middle_of_a_state_gets_it_whole_when_the_next_is_staged(donor: Donor) -> None:
    """P3: never a mixture of two steps."""
    state = random_state(40)
    donor.stage("g", 1, state, 0, 1)
    relay = Relay(donor.port, pause_after=1 << 20)
    fetching = Background(lambda: get(relay.place))
    assert relay.paused.wait(LIMIT_S)

    donor.stage("h", 2, random_state(1), 0, 1)
    relay.resume.set()

    fetched = fetching.outcome()
    relay.close()
    assert fetched.level == 1
    assert same(fetched, state)


@pytest.mark.parametrize("drop", ["release", "replace"])
def test_a_state_that_is_gone_is_missing_at_once(donor: Donor, drop: str) -> None:
    donor.stage("g", 1, random_state(), 0, 1)
    if drop == "release":
        donor.release()
    else:
        donor.stage("h", 2, random_state(), 0, 1)

    with pytest.raises(SnapshotMissing, match="does not have this state any more"):
        get(donor)


def test_who_waits_for_a_state_that_goes_before_it_was_told_is_sent_away(donor: Donor) -> None:
    donor.stage("g", 1, random_state(), 0, 1)
    donor.release()
    donor.stage("g", 1, random_state(), 0, 1)

    assert get(donor).level == 1


def test_a_state_that_never_comes_is_missing_after_the_limit(donor: Donor) -> None:
    with pytest.raises(SnapshotMissing, match="has nothing under g yet") as caught:
        get(donor, limit_s=0.1)

    assert caught.value.address == f"{HERE}:{donor.port}"
    wait_until(lambda: not donor._guests)


def test_another_stripe_than_the_one_asked_for_is_refused(donors: list[Donor]) -> None:
    for part in range(2):
        donors[part].stage("g", 1, random_state(), part, 2)

    with pytest.raises(SnapshotMissing, match="the donor has stripe 1 of 2, not 0 of 2"):
        get(donors[1], donors[0])


def test_donors_of_different_steps_are_found_out(donors: list[Donor]) -> None:
    for part in range(2):
        donors[part].stage("g", part, random_state(), part, 2)

    with pytest.raises(BitsDiffer, match=r"donors staged different steps under g: \[0, 1\]"):
        get(*donors[:2])


def test_donors_of_different_plain_values_are_found_out_by_name(donors: list[Donor]) -> None:
    for part in range(2):
        donors[part].stage("g", 1, state_of(torch.rand(2000), count=part), part, 2)

    with pytest.raises(BitsDiffer, match=r"first in item\.count"):
        get(*donors[:2])


def test_results_are_remembered_until_they_are_forgotten(donor: Donor) -> None:
    large = random.Random(0).randbytes(3 << 20)
    waiting = Background(lambda: remembered(donor, "sum/1"))
    wait_until(lambda: len(donor._guests) == 1)
    donor.remember("sum/1", large)
    donor.remember("empty", b"")

    assert waiting.outcome() == remembered(donor, "sum/1") == large
    assert remembered(donor, "empty") == b""

    donor.forget()

    with pytest.raises(SnapshotMissing):
        remembered(donor, "sum/1", limit_s=0.1)


@pytest.mark.parametrize("call", [get, lambda donor, key: remembered(donor, "g", key)])
def test_whoever_has_another_key_gets_nothing(donor: Donor, call: Callable[..., Any]) -> None:
    """P6."""
    donor.stage("g", 1, random_state(), 0, 1)
    donor.remember("g", b"secret")

    with pytest.raises(SnapshotCorrupt, match="does not come from an owner of this job's key"):
        call(donor, key=OTHER_KEY)


def test_a_donor_that_has_another_key_is_not_believed(donor: Donor) -> None:
    stranger = Donor(HERE, OTHER_KEY)
    stranger.stage("g", 1, random_state(), 0, 1)

    with pytest.raises(SnapshotCorrupt):
        get(stranger)
    stranger.close()


@pytest.mark.parametrize("key", [b"", b"short", bytes(33)])
def test_a_key_of_another_size_is_refused(key: bytes) -> None:
    with pytest.raises(ConfigError, match="it must have 32"):
        Donor(HERE, key)
    with pytest.raises(ConfigError, match="it must have 32"):
        fetch([(HERE, 1)], "g", key, cancelled=never, limit_s=1.0)


@pytest.mark.parametrize("where", [40, 100, 200, 5000, 1_500_000, 3_100_000])
def test_a_bit_that_flips_on_the_way_is_found(donor: Donor, where: int) -> None:
    """P6: in the answer's first message, the header, and frames of the stripe alike."""
    donor.stage("g", 1, random_state(), 0, 1)
    relay = Relay(donor.port, damage=where)

    with pytest.raises((SnapshotCorrupt, Unreachable)):
        get(relay.place, limit_s=5.0)
    relay.close()


def test_an_answer_recorded_earlier_does_not_pass_for_a_new_one(donor: Donor) -> None:
    """P6: it was sealed for another challenge and nonce."""
    donor.remember("g", b"old")
    recorded = bytearray()
    with socket.create_connection((HERE, donor.port)) as connection:
        challenge = line.receive(connection, line.CHALLENGE_BYTES)
        request = msgspec.msgpack.encode(line.ResultOf("g", bytes(16)))
        line.send_message(connection, request, line.request_tag(KEY, challenge, request))
        while data := connection.recv(1 << 16):
            recorded += data

    with socket.create_server((HERE, 0)) as server:
        asking = Background(lambda: recall((HERE, server.getsockname()[1]), "g", KEY, never, LIMIT_S))
        connection, _ = server.accept()
        with connection:
            connection.sendall(challenge + recorded)
            with pytest.raises(SnapshotCorrupt):
                asking.outcome()


def test_a_request_recorded_earlier_is_not_answered(donor: Donor) -> None:
    """P6: the challenge is new each time."""
    donor.remember("g", b"secret")
    request = msgspec.msgpack.encode(line.ResultOf("g", bytes(16)))
    with socket.create_connection((HERE, donor.port)) as first:
        challenge = line.receive(first, line.CHALLENGE_BYTES)
    with socket.create_connection((HERE, donor.port)) as second:
        line.receive(second, line.CHALLENGE_BYTES)
        line.send_message(second, request, line.request_tag(KEY, challenge, request))
        answer = b""
        while data := second.recv(1 << 16):
            answer += data

    assert b"Refusal" in answer and b"secret" not in answer


def junk(connection: socket.socket) -> None:
    connection.sendall(random.Random(0).randbytes(1 << 16))


def too_much(connection: socket.socket) -> None:
    connection.sendall((1 << 31).to_bytes(4, "little") + b"x" * 100)


def half(connection: socket.socket) -> None:
    connection.sendall((100).to_bytes(4, "little") + b"x" * 50)
    connection.shutdown(socket.SHUT_WR)


def another_message(connection: socket.socket) -> None:
    """By an owner of the key, but none that a donor knows."""
    challenge = line.receive(connection, line.CHALLENGE_BYTES)
    line.send_message(connection, b"\xc0", line.request_tag(KEY, challenge, b"\xc0"))


def two_requests(connection: socket.socket) -> None:
    challenge = line.receive(connection, line.CHALLENGE_BYTES)
    request = msgspec.msgpack.encode(line.ResultOf("never", bytes(16)))
    line.send_message(connection, request, line.request_tag(KEY, challenge, request))
    connection.sendall(b"and more")


@pytest.mark.parametrize("say", [junk, too_much, half, another_message, two_requests])
def test_strangers_are_shown_out_and_do_no_harm(donor: Donor, say: Callable[[socket.socket], None]) -> None:
    """P6."""
    with socket.create_connection((HERE, donor.port), LIMIT_S) as connection:
        say(connection)
        # Perhaps it was not even read to its end.
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass

    donor.stage("g", 1, random_state(), 0, 1)
    assert get(donor).level == 1
    wait_until(lambda: not donor._strangers and not donor._guests)


def test_who_says_nothing_is_shown_out_after_a_while(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_module, "_HELLO_S", 0.2)
    with socket.create_connection((HERE, donor.port), LIMIT_S) as connection:
        line.receive(connection, line.CHALLENGE_BYTES)

        assert connection.recv(1) == b""


def test_any_number_of_silent_strangers_keep_nobody_out(donor: Donor) -> None:
    donor.stage("g", 1, random_state(), 0, 1)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((HERE, donor.port), LIMIT_S))

        begin = time.monotonic()
        assert get(donor).level == 1
        assert time.monotonic() - begin < AT_ONCE_S
        assert len(donor._strangers) <= 32


def test_more_guests_than_a_donor_serves_are_told_so(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_module, "_MAX_GUESTS", 1)
    waiting = Background(lambda: remembered(donor, "g"))
    wait_until(lambda: len(donor._guests) == 1)

    with pytest.raises(SnapshotMissing, match="serves too many others"):
        remembered(donor, "g")

    donor.remember("g", b"")
    waiting.outcome()


def test_a_donor_that_closes_sends_everybody_away(donors: list[Donor]) -> None:
    fetching = Background(lambda: get(*donors[:2]))
    for each in donors[:2]:
        wait_until(lambda each=each: len(each._guests) == 1)  # type: ignore[misc]

    donors[0].close()

    with pytest.raises(Unreachable):
        fetching.outcome(AT_ONCE_S)


def test_nobody_at_the_address_is_unreachable_at_once() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(Unreachable, match="ECONNREFUSED"):
        get((HERE, port))


def test_no_donor_at_all_is_missing() -> None:
    with pytest.raises(SnapshotMissing, match="nobody has the state g"):
        get()


def test_a_donor_under_a_name_is_found() -> None:
    donor = Donor("localhost", KEY)
    donor.stage("g", 1, random_state(), 0, 1)

    assert get(("localhost", donor.port)).level == 1
    donor.close()


def test_a_donor_listens_on_its_own_address_alone(donor: Donor) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", donor.port), LIMIT_S)


@contextlib.contextmanager
def full_listener() -> Iterator[tuple[str, int]]:
    """A place where connecting neither succeeds nor fails."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind((HERE, 0))
        server.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()


@contextlib.contextmanager
def mute_listener() -> Iterator[tuple[str, int]]:
    """A place that takes connections and says nothing."""
    with socket.create_server((HERE, 0)) as server:
        yield server.getsockname()


@contextlib.contextmanager
def empty_donor() -> Iterator[tuple[str, int]]:
    """A donor that has not staged anything."""
    donor = Donor(HERE, KEY)
    yield HERE, donor.port
    donor.close()


@contextlib.contextmanager
def stuck_donor() -> Iterator[tuple[str, int]]:
    """A donor that stops in the middle of a stripe."""
    donor = Donor(HERE, KEY)
    donor.stage("g", 1, random_state(40), 0, 1)
    relay = Relay(donor.port, pause_after=2 << 20)
    yield relay.place
    relay.close()
    donor.close()


@pytest.mark.parametrize("place", [full_listener, mute_listener, empty_donor, stuck_donor])
def test_who_is_cancelled_comes_out_at_once_wherever_it_is_blocked(
    place: Callable[[], contextlib.AbstractContextManager[tuple[str, int]]],
) -> None:
    """P5."""
    with place() as where:
        cancelled, looked = threading.Event(), threading.Semaphore(0)

        def look() -> bool:
            looked.release()
            return cancelled.is_set()

        fetching = Background(lambda: fetch([where], "g", KEY, cancelled=look, limit_s=LIMIT_S))
        for _ in range(5):
            assert looked.acquire(timeout=LIMIT_S)
        begin = time.monotonic()
        cancelled.set()

        with pytest.raises(SnapshotAborted):
            fetching.outcome(AT_ONCE_S)
        assert fetching.ended_at - begin < AT_ONCE_S


def test_an_event_cancels_too(donor: Donor) -> None:
    cancelled = threading.Event()
    asking = Background(lambda: recall((HERE, donor.port), "g", KEY, cancelled, LIMIT_S))
    wait_until(lambda: len(donor._guests) == 1)

    cancelled.set()

    with pytest.raises(SnapshotAborted):
        asking.outcome(AT_ONCE_S)


def test_nothing_is_written_into_a_module_after_a_transfer_was_given_up() -> None:
    model = torch.nn.Linear(2000, 2000)
    donor = Donor(HERE, KEY)
    donor.stage("g", 1, State({"model": torch.nn.Linear(2000, 2000)}, {}, b""), 0, 1)
    relay = Relay(donor.port, pause_after=4 << 20)
    fetching = Background(
        lambda: fetch([relay.place], "g", KEY, cancelled=relay.paused, limit_s=LIMIT_S, modules={"model": model})
    )
    with pytest.raises(SnapshotAborted):
        fetching.outcome()
    after = model.weight.detach().clone()

    relay.close()
    donor.close()

    assert torch.equal(model.weight, after)


DONOR_PROCESS = """
import sys, torch
from craft.snapshots.donor import Donor
from craft.snapshots.portable import State
model = torch.nn.Linear(2000, 5000)
donor = Donor("127.0.0.1", bytes(range(32)))
donor.stage("g", 1, State({"model": model}, {}, b""), 0, 1)
print(donor.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_donor_that_dies_in_the_middle_is_lost_at_once(signum: signal.Signals) -> None:
    """P5."""
    process = subprocess.Popen(
        [sys.executable, "-c", DONOR_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        relay = Relay(int(process.stdout.readline()), pause_after=2 << 20)
        fetching = Background(lambda: get(relay.place))
        assert relay.paused.wait(LIMIT_S)

        os.kill(process.pid, signum)
        process.wait(LIMIT_S)
        relay.resume.set()

        with pytest.raises(Unreachable):
            fetching.outcome(AT_ONCE_S)
        relay.close()


def test_one_donor_that_is_lost_ends_the_whole_transfer_at_once(donors: list[Donor]) -> None:
    """P5: the others may go on for long, or never have staged anything."""
    with socket.create_server((HERE, 0)) as server:
        place = server.getsockname()
        fetching = Background(lambda: get(donors[0], place))
        wait_until(lambda: len(donors[0]._guests) == 1)
        server.accept()[0].close()

        with pytest.raises(Unreachable) as caught:
            fetching.outcome(AT_ONCE_S)

    assert caught.value.address == f"{HERE}:{place[1]}"
    wait_until(lambda: not donors[0]._guests)


def test_a_donor_that_falls_silent_is_lost_after_the_limit() -> None:
    with stuck_donor() as place, pytest.raises(Unreachable, match="silent"):
        get(place, limit_s=0.3)
