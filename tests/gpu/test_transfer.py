"""A state goes from the memory of one device to that of another, over several connections, and every bit arrives."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.test_copies import Net, stepped
from tests.unit.snapshots.travel import HERE, KEY, LIMIT_S, Background, Relay, never

from craft.protocol.errors import SnapshotAborted, SnapshotCorrupt
from craft.snapshots.state.device_copy import hold_back
from craft.snapshots.state.serialized import State, load
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import Fetched, fetch


def joiner() -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def moved(state: State, net: Net, of: int, lanes: int) -> Fetched:
    donors = [Donor(HERE, KEY) for _ in range(of)]
    try:
        for part, donor in enumerate(donors):
            donor.reserve(state.header.total_bytes // of + 8192)
            donor.stage("g", 7, state, part, of)
        hold_back()
        # As the script's update does: what is staged is on its way to the host, or there.
        for tensor in state.tensors:
            tensor.zero_()
        places = [(HERE, donor.port) for donor in donors]
        modules = {"model": net}
        return fetch(places, "g", KEY, cancelled=never, limit_s=LIMIT_S, modules=modules, lanes=lanes)
    finally:
        for donor in donors:
            donor.close()


@pytest.mark.parametrize(("of", "lanes"), [(1, 1), (2, 1), (1, 3), (2, 4)])
def test_a_state_comes_down_on_the_device_that_it_was_on_P1(of: int, lanes: int) -> None:
    net, optimizer = stepped()
    state = State({"model": net}, {"optimizer": optimizer}, b"")
    expected = [tensor.detach().clone() for tensor in state.tensors]
    other, fresh = joiner()

    fetched = moved(state, other, of, lanes)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(fetched.tensors, expected, strict=True))
    assert fetched.tensors[0].data_ptr() == other.weight.data_ptr(), "a parameter is filled where it is"
    load(fetched.header, fetched.tensors, {"model": other}, {"optimizer": fresh})
    mine = fresh.state[other.weight]["exp_avg"]
    assert mine.data_ptr() in [tensor.data_ptr() for tensor in fetched.tensors], "and nothing is copied again"
    assert mine.is_cuda and fresh.state[other.weight]["step"].device.type == "cpu"


def test_pinned_memory_is_used_again_for_the_next_who_joins() -> None:
    net, optimizer = stepped()
    donor = Donor(HERE, KEY)
    places = []
    for name in ("g", "h"):
        state = State({"model": net}, {"optimizer": optimizer}, b"")
        donor.reserve(state.header.total_bytes)
        donor.stage(name, 1, state, 0, 1)
        assert donor._staged is not None
        places.append(torch.frombuffer(donor._staged.view, dtype=torch.uint8).data_ptr())
        other = Net()
        fetch([(HERE, donor.port)], name, KEY, cancelled=never, limit_s=LIMIT_S, modules={"model": other}, lanes=2)
        assert torch.equal(other.weight, net.weight)
        donor.release()
        net.weight.data.add_(1)
    donor.close()

    assert places[0] == places[1]


def test_a_byte_that_flips_on_the_way_to_a_device_is_found_P6() -> None:
    net, optimizer = stepped()
    donor = Donor(HERE, KEY)
    donor.stage("g", 1, State({"model": net}, {"optimizer": optimizer}, b""), 0, 1)
    relay = Relay(donor.port, damage=100 << 20)

    with pytest.raises(SnapshotCorrupt):
        fetch([relay.place], "g", KEY, cancelled=never, limit_s=LIMIT_S, modules={"model": Net()})
    relay.close()
    donor.close()


def test_a_transfer_to_a_device_that_is_cancelled_ends_at_once() -> None:
    net, optimizer = stepped()
    donor = Donor(HERE, KEY)
    donor.stage("g", 1, State({"model": net}, {"optimizer": optimizer}, b""), 0, 1)
    relay = Relay(donor.port, pause_after=50 << 20)
    modules = {"model": Net()}
    fetching = Background(
        lambda: fetch([relay.place], "g", KEY, cancelled=relay.paused, limit_s=LIMIT_S, modules=modules)
    )

    with pytest.raises(SnapshotAborted):
        fetching.outcome()
    relay.close()
    donor.close()
