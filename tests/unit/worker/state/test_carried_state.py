"""``step.carry``: what a microbatch leaves is read by the same microbatch of the next step, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from craft.decide.step.combine import combine
from craft.protocol.control_word import Carried, MicrobatchRecord, Word
from craft.protocol.errors import ConfigError
from craft.snapshots.state.serialized import State, load
from craft.worker.state.carried_state import CarriedLane, CarriedState, carry, unpack

from ..alone import alone, dataset, loss_of, model

CPU = torch.device("cpu")


def pack_of(lane: CarriedLane) -> torch.Tensor:
    return lane._left()


def lane_of(**values: Any) -> CarriedLane:
    return carry(CarriedLane({}), values, reset=False)


def test_tensors_numbers_and_what_is_made_of_them_come_back_bit_for_bit() -> None:
    values: dict[str, Any] = {
        "hidden": (torch.randn(2, 3), torch.randn(3, 2).t()),
        "nested": {"a": [1, -0.0, None], "b": {"c": torch.tensor(3, dtype=torch.int16)}, "s": "text"},
        "empty": torch.empty(0, 4),
        "half": torch.randn(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    found = unpack(pack_of(lane_of(**values)), CPU)

    for mine, theirs in zip(values["hidden"], found["hidden"], strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    assert str(found["nested"]) == str(values["nested"])
    assert found["empty"].shape == (0, 4)
    assert found["half"].dtype is torch.bfloat16 and torch.equal(found["half"], values["half"])
    assert found["flags"].tolist() == [True, False]


def test_the_state_of_a_generator_is_carried() -> None:
    generator = torch.Generator().manual_seed(5)
    lane = lane_of(drawn=generator)
    torch.rand(3, generator=lane.drawn)
    (goes_on,) = unpack(pack_of(lane), CPU).values()

    assert torch.equal(torch.rand(2, generator=goes_on), torch.rand(2, generator=lane.drawn))
    assert torch.equal(torch.rand(1, generator=generator), torch.rand(1, generator=torch.Generator().manual_seed(5)))


def test_what_is_kept_is_detached_and_an_initial_value_may_be_learned() -> None:
    initial = torch.nn.Parameter(torch.ones(2))
    lane = lane_of(hidden=lambda: initial)
    (lane.hidden * 2).sum().backward()
    assert initial.grad is not None and initial.grad.tolist() == [2.0, 2.0]
    lane.hidden = lane.hidden * 3
    found = unpack(pack_of(lane), CPU)["hidden"]
    assert not found.requires_grad and found.tolist() == [3.0, 3.0]


def test_an_initial_value_that_is_given_to_several_lanes_belongs_to_none_of_them() -> None:
    zeros = torch.zeros(2)
    lane_of(hidden=zeros).hidden.add_(1)
    assert lane_of(hidden=zeros).hidden.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [object(), {1.5: 1}, {"a": {1, 2}}, [torch.Generator()], torch.nn.Linear(1, 1)])
def test_what_would_not_come_back_is_refused_with_its_name(value: Any) -> None:
    lane = lane_of(other=0)
    lane.other = value
    with pytest.raises(ConfigError, match=r"step.carry: other.* is a .* at the end of its microbatch"):
        pack_of(lane)


def test_a_name_without_an_initial_value_is_refused() -> None:
    lane = lane_of(hidden=0)
    with pytest.raises(ConfigError, match="no initial value of 'hiden'"):
        lane.hiden = 1
    with pytest.raises(AttributeError, match="no initial value of 'other'"):
        _ = lane.other
    with pytest.raises(ConfigError, match="begin with a letter"):
        lane_of(_values=1)


def rows_of(**lanes: Any) -> tuple[list[Carried], dict[int, torch.Tensor]]:
    """Of microbatches 0 and 2 on rank 0, and 1 on rank 1, the way words and rows of bytes come."""
    packed = {int(name[1:]): pack_of(lane_of(value=value)) for name, value in lanes.items()}
    owners = {0: 0, 1: 1, 2: 0}
    words = [
        Word(
            step=0,
            records=tuple(
                MicrobatchRecord(microbatch=each, weight=1.0, present=b"", carried=row.numel())
                for each, row in sorted(packed.items())
                if owners[each] == rank
            ),
        )
        for rank in range(2)
    ]
    rows = {rank: [row for each, row in sorted(packed.items()) if owners[each] == rank] for rank in range(2)}
    return list(combine(words).carried), {rank: torch.cat(found) for rank, found in rows.items() if found}


def test_each_lane_takes_its_own_part_of_what_came_and_the_others_stay() -> None:
    lanes = CarriedState(CPU)
    lanes.commit(*rows_of(m0=1, m1=torch.ones(3), m2="a longer one"))
    lanes.commit(*rows_of(m0=5, m2=[1, 2]))

    read = [carry(lanes.open(each), {"value": None}, reset=False).value for each in range(4)]
    assert read[0] == 5 and read[1].tolist() == [1.0] * 3 and read[2:] == [[1, 2], None]
    assert carry(lanes.open(0), {"value": 7}, reset=True).value == 7


def test_a_step_that_carries_nothing_says_nothing() -> None:
    word = Word(step=0, records=(MicrobatchRecord(microbatch=0, weight=1.0, present=b""),))
    assert combine([word]).carried == ()


def test_lanes_are_part_of_the_state_once_there_are_any() -> None:
    """P1: to those who join, into checkpoints, and back to one from before there were any."""
    here, there = CarriedState(CPU), CarriedState(CPU)
    empty = State({}, {"step.carry": here}, b"")
    assert empty.header.skeleton == {}
    here.commit(*rows_of(m0=torch.arange(3), m1=2))
    state = State({}, {"step.carry": here}, b"")
    load(state.header, state.tensors, {}, {"step.carry": there})
    assert carry(there.open(0), {"value": 0}, reset=False).value.tolist() == [0, 1, 2]
    assert there.state_dict().keys() == {"0", "1"}
    load(empty.header, [], {}, {"step.carry": there})
    assert there.state_dict() == {}


def test_a_script_reads_what_the_same_microbatch_left_in_the_step_before() -> None:
    net, seen = model(), []
    # No microbatch is computed a second time for comparison.
    job = alone(check_bits=False)
    job.replicate(net)
    for step in job.steps(dataset(24), global_batch=6, microbatches=3, steps=4, shuffle=False):
        for batch in step:
            lane = step.carry(path=list, count=0, reset=step.number == 3)
            seen.append((step.microbatch, lane.count, len(lane.path)))
            loss_of(net, batch).backward()
            lane.count += 1
            lane.path.append(torch.ones(2))
            assert step.carry(count=9).count == lane.count
        with pytest.raises(ConfigError, match="belongs into the inner loop"):
            step.carry(count=0)
    assert seen == [(each, number % 3, number % 3) for number in range(4) for each in range(3)]


def test_a_loop_of_the_scripts_own_carries_nothing() -> None:
    net = model()
    job = alone()
    job.replicate(net)
    for attempt in job.attempts(microbatches=1, steps=1):
        with attempt, pytest.raises(ConfigError, match=r"step.carry in job.steps\(\) only"):
            attempt.carry(hidden=0)
