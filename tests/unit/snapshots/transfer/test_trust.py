"""Donors and strangers: who has not the job's key gets nothing, changes nothing and delays nobody."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from craft.protocol.errors import (
    ConfigError,
    SnapshotCorrupt,
    SnapshotMissing,
    Unreachable,
)
from craft.snapshots.transfer import protocol
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import fetch, recall
from craft.telemetry import fault_points
from craft.testing import faults
from craft.wire import peer_server, peers

from ..travel import (
    AT_ONCE_S,
    HERE,
    KEY,
    LIMIT_S,
    Background,
    Relay,
    get,
    never,
    random_state,
    remembered,
    wait_until,
)

OTHER_KEY = bytes(32)


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
        challenge = peers.receive(connection, peers.CHALLENGE_BYTES)
        request = msgspec.msgpack.encode(protocol.ResultOf("g", bytes(16)))
        peers.send_message(connection, request, peers.request_tag(KEY, challenge, request))
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
    request = msgspec.msgpack.encode(protocol.ResultOf("g", bytes(16)))
    with socket.create_connection((HERE, donor.port)) as first:
        challenge = peers.receive(first, peers.CHALLENGE_BYTES)
    with socket.create_connection((HERE, donor.port)) as second:
        peers.receive(second, peers.CHALLENGE_BYTES)
        peers.send_message(second, request, peers.request_tag(KEY, challenge, request))
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
    challenge = peers.receive(connection, peers.CHALLENGE_BYTES)
    peers.send_message(connection, b"\xc0", peers.request_tag(KEY, challenge, b"\xc0"))


def two_requests(connection: socket.socket) -> None:
    challenge = peers.receive(connection, peers.CHALLENGE_BYTES)
    request = msgspec.msgpack.encode(protocol.ResultOf("never", bytes(16)))
    peers.send_message(connection, request, peers.request_tag(KEY, challenge, request))
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
    wait_until(lambda: not donor._server.num_strangers and not donor._server.num_peers)


def test_who_says_nothing_is_shown_out_after_a_while(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "_HELLO_S", 0.2)
    with socket.create_connection((HERE, donor.port), LIMIT_S) as connection:
        peers.receive(connection, peers.CHALLENGE_BYTES)

        assert connection.recv(1) == b""


def test_any_number_of_silent_strangers_keep_nobody_out(donor: Donor) -> None:
    donor.stage("g", 1, random_state(), 0, 1)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((HERE, donor.port), LIMIT_S))

        begin = time.monotonic()
        assert get(donor).level == 1
        assert time.monotonic() - begin < AT_ONCE_S
        assert donor._server.num_strangers <= 128


def test_a_donor_takes_connections_again_after_the_system_could_not(donor: Donor) -> None:
    donor.stage("g", 1, random_state(), 0, 1)
    faults.arm([faults.PlacedFault(point="donor.accept", kind="error", errno="EMFILE", seconds=1.0)])
    try:
        # The thread is in an accept that was not to fail.
        socket.create_connection((HERE, donor.port), LIMIT_S).close()
        assert get(donor).level == 1
    finally:
        fault_points.listen(None)


def test_more_guests_than_a_donor_serves_are_told_so(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor._server, "_max_peers", 1)
    waiting = Background(lambda: remembered(donor, "g"))
    wait_until(lambda: donor._server.num_peers == 1)

    with pytest.raises(SnapshotMissing, match="serves too many others"):
        remembered(donor, "g")

    donor.remember("g", b"")
    waiting.outcome()
