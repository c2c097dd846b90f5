"""Transfers that cannot be finished: whatever it is blocked in, a fetch comes out at once and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from craft.protocol.errors import (
    SnapshotAborted,
    SnapshotMissing,
    Unreachable,
)
from craft.snapshots.state.serialized import State
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import fetch, recall

from ..travel import (
    AT_ONCE_S,
    HERE,
    KEY,
    LIMIT_S,
    Background,
    Relay,
    get,
    random_state,
    wait_until,
)


def test_a_donor_that_closes_sends_everybody_away(donors: list[Donor]) -> None:
    fetching = Background(lambda: get(*donors[:2]))
    for each in donors[:2]:
        wait_until(lambda each=each: each._server.num_peers == 1)  # type: ignore[misc]

    donors[0].close()

    with pytest.raises(Unreachable):
        fetching.outcome(AT_ONCE_S)


def test_nobody_at_the_address_is_unreachable_at_once() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(Unreachable, match="ECONNREFUSED"):
        get((HERE, port))


def test_no_donor_at_all_is_missing() -> None:
    with pytest.raises(SnapshotMissing, match="no worker has the state g"):
        get()


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
    wait_until(lambda: donor._server.num_peers == 1)

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
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.state.serialized import State
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
        wait_until(lambda: donors[0]._server.num_peers == 1)
        server.accept()[0].close()

        with pytest.raises(Unreachable) as caught:
            fetching.outcome(AT_ONCE_S)

    assert caught.value.address == f"{HERE}:{place[1]}"
    wait_until(lambda: not donors[0]._server.num_peers)


def test_a_donor_that_falls_silent_is_lost_after_the_limit() -> None:
    with stuck_donor() as place, pytest.raises(Unreachable, match="silent"):
        get(place, limit_s=0.3)
