"""Donors and who fetches from them: parallel, checked, and quick to come out of whatever goes wrong."""

from __future__ import annotations

import random
import socket

import pytest
import torch

from craft.protocol.errors import (
    BitsDiffer,
    SnapshotMissing,
)
from craft.snapshots.transfer.donor import Donor

from ..travel import (
    HERE,
    KEY,
    LIMIT_S,
    Background,
    Relay,
    get,
    random_state,
    remembered,
    same,
    state_of,
    wait_until,
)


@pytest.mark.parametrize("of", [1, 2, 3])
def test_stripes_of_several_donors_make_one_state(donors: list[Donor], of: int) -> None:
    state = random_state()
    for part in range(of):
        donors[part].stage("g", 41, state, part, of)

    fetched = get(*donors[:of])

    assert fetched.level == 41
    assert same(fetched, state)


@pytest.mark.parametrize(("of", "lanes"), [(1, 2), (2, 3), (1, 9)])
def test_stripes_come_over_several_connections_each_also_over_more_than_they_have_frames(
    donors: list[Donor], of: int, lanes: int
) -> None:
    state = random_state(7)
    for part in range(of):
        donors[part].stage("g", 41, state, part, of)

    fetched = get(*donors[:of], lanes=lanes)

    assert fetched.level == 41
    assert same(fetched, state)


def test_more_connections_than_a_stripe_may_have_are_refused(donor: Donor) -> None:
    donor.stage("g", 1, random_state(), 0, 1)

    with pytest.raises(SnapshotMissing, match=r"there is no lane \d+ of 65"):
        get(donor, lanes=65)


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
    assert donor.prepared, "nothing was asked for"
    for size in (state.header.total_bytes, state.header.total_bytes * 2, 1):
        donor.reserve(size)
        wait_until(lambda: donor.prepared)
        donor.stage("g", 1, state, 0, 1)
        assert same(get(donor), state)


def test_who_comes_before_it_is_staged_waits_for_it(donors: list[Donor]) -> None:
    state = random_state()
    fetching = Background(lambda: get(*donors[:2]))
    for part in range(2):
        wait_until(lambda part=part: donors[part]._server.num_peers == 1)  # type: ignore[misc]
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


def test_a_name_that_is_staged_again_is_there_again(donor: Donor) -> None:
    donor.stage("g", 1, random_state(), 0, 1)
    donor.release()
    donor.stage("g", 1, random_state(), 0, 1)

    assert get(donor).level == 1


def test_a_state_that_never_comes_is_missing_after_the_limit(donor: Donor) -> None:
    with pytest.raises(SnapshotMissing, match="has nothing under g yet") as caught:
        get(donor, limit_s=0.1)

    assert caught.value.address == f"{HERE}:{donor.port}"
    wait_until(lambda: not donor._server.num_peers)


def test_another_stripe_than_the_one_asked_for_is_refused(donors: list[Donor]) -> None:
    for part in range(2):
        donors[part].stage("g", 1, random_state(), part, 2)

    with pytest.raises(SnapshotMissing, match=r"the donor has stripe [01] of 2, not [01] of 2"):
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
    wait_until(lambda: donor._server.num_peers == 1)
    donor.remember("sum/1", large)
    donor.remember("empty", b"")

    assert waiting.outcome() == remembered(donor, "sum/1") == large
    assert remembered(donor, "empty") == b""

    donor.forget()

    with pytest.raises(SnapshotMissing):
        remembered(donor, "sum/1", limit_s=0.1)


def test_a_donor_under_a_name_is_found() -> None:
    donor = Donor("localhost", KEY)
    donor.stage("g", 1, random_state(), 0, 1)

    assert get(("localhost", donor.port)).level == 1
    donor.close()


def test_a_donor_listens_on_its_own_address_alone(donor: Donor) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", donor.port), LIMIT_S)
