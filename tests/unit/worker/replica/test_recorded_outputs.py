"""Outputs that a worker takes over from a twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed

from craft.groups.sharded.reductions import AllReduce
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Member
from craft.snapshots.transfer.donor import Donor
from craft.worker.replica.recorded_outputs import RecordedOutputs

from ..members import KEY

dist: Any = torch.distributed


def operation(*values: float, dtype: torch.dtype = torch.float32) -> AllReduce:
    return AllReduce(torch.tensor(values, dtype=dtype), dist.ReduceOp.SUM, 2)


@pytest.fixture
def twin() -> Iterator[tuple[RecordedOutputs, Member]]:
    """Records outputs; its member tells where they are."""
    donor = Donor("127.0.0.1", KEY)
    yield RecordedOutputs(donor, KEY), Member(worker_id="w0", address="127.0.0.1", state_port=donor.port)
    donor.close()


def take(member: Member, wanted: AllReduce, step: int = 5) -> bool:
    outputs = RecordedOutputs(None, KEY)
    outputs.begin_update(0, step, keep=False)
    return outputs.take(outputs.next_name(), wanted, lambda: [member], lambda: True, lambda: False)


def record(outputs: RecordedOutputs, step: int, done: AllReduce, *, keep: bool = False) -> None:
    outputs.begin_update(0, step, keep=keep)
    outputs.record(outputs.next_name(), done)


def test_an_output_is_the_twins_bit_for_bit(twin: tuple[RecordedOutputs, Member]) -> None:
    """P1: an update without a replica is the same update."""
    record(twin[0], 5, operation(0.1, -0.0, float("nan")))
    wanted = operation(7.0, 7.0, 7.0)

    assert take(twin[1], wanted)
    expected = torch.tensor([0.1, -0.0, float("nan")])
    assert wanted.outputs[0].view(torch.int32).equal(expected.view(torch.int32))


def test_another_call_in_the_same_place_is_refused(twin: tuple[RecordedOutputs, Member]) -> None:
    record(twin[0], 5, operation(1.0, 2.0))

    with pytest.raises(ConfigError, match="every replica has to run the same code"):
        take(twin[1], operation(1.0))


def test_a_worker_stops_waiting_for_a_twin_once_its_replica_can_perform_the_collective() -> None:
    outputs, asked = RecordedOutputs(None, KEY), []
    outputs.begin_update(0, 5, keep=False)

    def can_perform() -> bool:
        asked.append(1)
        return len(asked) > 2

    assert not outputs.take(outputs.next_name(), operation(1.0), lambda: (), lambda: True, can_perform)


def test_outputs_of_older_steps_are_dropped_unless_a_worker_catches_up(twin: tuple[RecordedOutputs, Member]) -> None:
    """P3: a name has its step, so that no output of another step is taken."""
    outputs, member = twin
    record(outputs, 5, operation(5.0))
    record(outputs, 6, operation(6.0))
    assert take(member, operation(0.0), 5)
    record(outputs, 7, operation(7.0), keep=True)
    assert take(member, operation(0.0), 5)
    record(outputs, 8, operation(8.0))

    wanted = operation(0.0)
    assert take(member, wanted, 8) and float(wanted.outputs[0]) == 8.0
    names = {name for _, kept in outputs._steps for name in kept}
    assert names == {"update0.7/0", "update0.8/0"}
