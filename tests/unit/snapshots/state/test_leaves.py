"""The training state as leaves, and the hashes taken of them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.protocol.errors import ConfigError
from craft.snapshots.state.leaves import Leaf, RotatingDigest, digest, digests, module_leaves, registered_leaves


class Registered:
    """Whatever a user registers: all that counts is what its state_dict gives."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any, /) -> None:
        self._state = state


def digest_of(state: Any) -> str:
    return digest(registered_leaves({"item": Registered(state)}))


def tensor_digest(tensor: torch.Tensor) -> str:
    return digest([Leaf("weight", tensor)])


def test_equal_states_have_equal_digests_wherever_they_are_in_memory() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)

    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
    assert tensor_digest(tensor) == tensor_digest(tensor.t().contiguous().t())


ONE = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(2, dtype=torch.float32), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
        (ONE, torch.nextafter(ONE, torch.tensor(2.0))),
        (torch.tensor(float("nan")), torch.tensor(float("inf"))),
        (torch.empty(0, 3), torch.empty(3, 0)),
        (torch.tensor([True]), torch.tensor([1], dtype=torch.uint8)),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
    ],
)
def test_a_digest_tells_bits_types_and_shapes_apart(left: torch.Tensor, right: torch.Tensor) -> None:
    assert tensor_digest(left) != tensor_digest(right)
    assert tensor_digest(left) == tensor_digest(left.clone())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"lr": 0.1}, {"lr": 0.1 + 2**-56}),
        ({"lr": 0.0}, {"lr": -0.0}),
        ({"lr": 1.0}, {"lr": 1}),
        ({"lr": 1}, {"lr": True}),
        ({"lr": 1}, {"lr": "1"}),
        ({"lr": None}, {"lr": "null"}),
        ({"lr": float("inf")}, {"lr": float("nan")}),
        ({"lr": 1j}, {"lr": 1 + 0j}),
        ({"lr": b"a"}, {"lr": b"b"}),
        ({"lr": {1, 2}}, {"lr": {1, 3}}),
        ({"lr": numpy.float32(1.0)}, {"lr": numpy.float32(2.0)}),
        ({"lr": numpy.zeros(2)}, {"lr": numpy.zeros(2, dtype=numpy.int64)}),
        ({"lr": [1, 2]}, {"lr": [2, 1]}),
        ({"a": 1}, {"b": 1}),
        ({"a": b"bc"}, {"ab": b"c"}),
        ({"a": b"1", "b": b"2"}, {"a": b"1item.b2"}),
    ],
)
def test_a_digest_tells_plain_values_apart(left: Any, right: Any) -> None:
    assert digest_of(left) != digest_of(right)


def test_a_digest_does_not_depend_on_the_order_in_which_things_were_registered() -> None:
    one, two = Registered({"x": torch.ones(2)}), Registered({"y": 3})

    assert digest(registered_leaves({"one": one, "two": two})) == digest(registered_leaves({"two": two, "one": one}))


def test_digests_name_the_leaf_that_differs() -> None:
    left = [Leaf("a", torch.zeros(2)), Leaf("b", torch.zeros(2))]
    right = [Leaf("a", torch.zeros(2)), Leaf("b", torch.ones(2))]

    differing = [name for (name, one), (_, other) in zip(digests(left), digests(right), strict=True) if one != other]

    assert differing == ["b"]


def test_parameters_and_buffers_are_leaves_even_if_they_are_not_saved() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2))
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)

    assert [leaf.name for leaf in module_leaves({"model": module})] == [
        "model.0.weight",
        "model.1.weight",
        "model.1.bias",
        "model.unsaved",
        "model.1.running_mean",
        "model.1.running_var",
        "model.1.num_batches_tracked",
    ]


def test_a_leaf_is_the_tensor_itself_and_not_a_copy() -> None:
    module = torch.nn.Linear(2, 2)

    (weight, _) = module_leaves({"model": module})

    assert isinstance(weight.value, torch.Tensor)
    assert weight.value is module.weight


def optimizers() -> dict[str, Any]:
    """What people register, with as much state as it can have."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler
    return {
        "optimizer": optimizer,
        "scaler": torch.amp.GradScaler("cpu"),
        "lambda": schedule.LambdaLR(optimizer, lambda _: 0.5),
        "one_cycle": schedule.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
        "plateau": schedule.ReduceLROnPlateau(optimizer),
        "multi_step": schedule.MultiStepLR(optimizer, [1, 2]),
        "sequence": schedule.SequentialLR(
            optimizer, [schedule.ConstantLR(optimizer), schedule.CosineAnnealingLR(optimizer, 5)], [2]
        ),
        "average": torch.optim.swa_utils.AveragedModel(model),
    }


@pytest.mark.parametrize("name", optimizers())
def test_what_people_register_can_be_walked(name: str) -> None:
    item = optimizers()[name]

    leaves = registered_leaves({name: item})

    assert leaves
    assert digest(leaves) == digest(registered_leaves({name: item}))


def test_nested_state_is_walked_to_its_leaves() -> None:
    state = OrderedDict(outer={"inner": [torch.ones(1), (2, None)]}, count=Counter({3: 1}))

    assert [leaf.name for leaf in registered_leaves({"item": Registered(state)})] == [
        "item.outer.inner.0",
        "item.outer.inner.1.0",
        "item.outer.inner.1.1",
        "item.count.3",
    ]


class Opaque:
    pass


@pytest.mark.parametrize("value", [Opaque(), numpy.array([Opaque()], dtype=object)])
def test_an_object_that_is_no_data_is_refused_by_name(value: object) -> None:
    """Hashing where it is in memory would find a difference between any two workers; leaving it out would find none."""
    with pytest.raises(ConfigError) as caught:
        digest_of({"nested": {"thing": value}})

    assert str(caught.value) == (
        f"item.nested.thing in the registered state is a {type(value).__qualname__}, which is neither a tensor nor plain"
        " data: leave it out of state_dict(), or turn it into tensors, numbers and strings there"
    )


def rotating(tensors: list[torch.Tensor], slice_bytes: int) -> RotatingDigest:
    digest = RotatingDigest(slice_bytes)
    digest.refresh([Leaf(f"t{index}", tensor) for index, tensor in enumerate(tensors)])
    return digest


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    slice_bytes=st.integers(1, 64),
    first_step=st.integers(0, 1000),
    data=st.data(),
)
def test_every_byte_has_its_turn_within_the_period(
    sizes: list[int], slice_bytes: int, first_step: int, data: st.DataObject
) -> None:
    """P3: silent divergence shows within a known number of steps, whichever byte it is in."""
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    changed = [tensor.clone() for tensor in tensors]
    which = data.draw(st.sampled_from([index for index, size in enumerate(sizes) if size] or [0]))
    if sizes[which]:
        changed[which][data.draw(st.integers(0, sizes[which] - 1))] = 1

    left, right = rotating(tensors, slice_bytes), rotating(changed, slice_bytes)
    found = [step for step in range(first_step, first_step + left.period) if left.take(step)() != right.take(step)()]

    assert left.period == right.period == max(1, -(-sum(sizes) // slice_bytes))
    assert len(found) == (1 if sizes[which] else 0)
    assert all(f"t{which}" in left.names(step) for step in found)


def test_a_rotating_digest_sees_what_a_tensor_is_now() -> None:
    tensor = torch.zeros(4)
    digest = rotating([tensor], 1024)
    before = digest.take(0)()

    tensor[0] = -0.0

    assert digest.take(0)() != before


def test_plain_values_have_no_turn() -> None:
    digest = RotatingDigest(16)

    digest.refresh([Leaf("lr", b"0.1"), Leaf("weight", torch.zeros(2))])

    assert (digest.period, digest.names(0)) == (1, ["weight"])


def test_a_rotating_digest_without_state_or_switched_off_says_nothing() -> None:
    assert RotatingDigest(16).take(0)() == b""
    assert RotatingDigest(16).names(0) == []
    assert not RotatingDigest(0).due(0)


def test_state_is_walked_at_the_beginning_and_then_after_whole_rounds() -> None:
    """Everybody walks at the same steps; once optimizers have their state, never in the middle of a round."""
    digest = rotating([torch.zeros(60, dtype=torch.uint8)], 10)
    assert digest.period == 6

    assert [step for step in range(200) if digest.due(step)] == [0, 2, 66, 132, 198]


def test_after_a_restart_state_is_walked_where_all_begin_anew() -> None:
    digest = rotating([torch.zeros(10)], 1000)

    digest.restart(7)

    assert digest.take(6)() == b""
    assert [step for step in range(3, 130) if digest.due(step)] == [7, 9, 64, 128]
