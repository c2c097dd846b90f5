"""Before the first step: the same settings, conditions and state on every worker, or a sentence that says what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from craft.groups.gloo import GlooGroup
from craft.protocol.errors import ConfigError
from craft.protocol.events import ParametersUnequal
from craft.snapshots.state.leaves import Leaf, digest, module_leaves, registered_leaves
from craft.worker.state.metadata import Conditions
from craft.worker.state.preflight import check_conditions, make_equal

from ..members import together

IDS = ("w0", "w1", "w2")
HERE = Conditions.here(torch.device("cpu"), {"seed": 0, "microbatches": 4})


def equalised(leaves_of: Callable[[int], list[Leaf]]) -> list[Any]:
    """What each of three members finds, and the digest that it has then."""

    def act(group: GlooGroup) -> tuple[ParametersUnequal | None, str]:
        leaves = leaves_of(group.rank)
        return make_equal(group, IDS, leaves), digest(leaves)

    return together(3, act)


def test_equal_states_are_left_as_they_are() -> None:
    found = equalised(lambda _: [Leaf("weight", torch.ones(3))])

    assert [unequal for unequal, _ in found] == [None] * 3


def test_alone_there_is_nothing_to_make_equal() -> None:
    assert make_equal(None, ("w0",), [Leaf("weight", torch.ones(3))]) is None


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.zeros(2, dtype=torch.complex64),
    ],
    ids=["transposed", "bfloat16", "scalar", "bool", "complex"],
)
def test_everybody_gets_the_state_of_rank_0(value: torch.Tensor) -> None:
    def leaves_of(rank: int) -> list[Leaf]:
        own = value.clone()
        if rank == 2:
            own.copy_(~value if value.dtype is torch.bool else value + 1)
        return [Leaf("empty", torch.empty(0, 2)), Leaf("weight", own), Leaf("other", torch.ones(2))]

    found = equalised(leaves_of)

    expected = ParametersUnequal(worker_ids=("w2",), source="w0", first="weight")
    assert found == [(expected, digest(leaves_of(0)))] * 3


def test_parameters_and_optimizer_state_are_written_in_place() -> None:
    models = [torch.nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()

    def leaves_of(rank: int) -> list[Leaf]:
        return [*module_leaves({"model": models[rank]}), *registered_leaves({"optimizer": optimizers[rank]})]

    equalised(leaves_of)

    assert len({digest(leaves_of(rank)) for rank in range(3)}) == 1
    assert models[0].weight.requires_grad


def sentence(found: list[Any]) -> str:
    """The one sentence that all members were told."""
    assert all(isinstance(error, ConfigError) for error in found), found
    (one,) = {str(error) for error in found}
    return one


def test_plain_values_that_differ_are_an_error_that_names_the_first() -> None:
    found = equalised(lambda rank: [Leaf("weight", torch.full((2,), float(rank))), Leaf("lr", str(rank).encode())])

    assert sentence(found) == (
        "workers begin with different values of lr, which cannot be copied from w0:"
        " make it the same in every worker (CRAFT can copy only tensors that state_dict() returns by reference)"
    )


def test_tensors_of_different_shapes_are_an_error_that_names_the_first() -> None:
    """Sent anyway, they would not fit into their places at the other end."""
    found = equalised(lambda rank: [Leaf("a", torch.ones(2)), Leaf("weight", torch.ones(2 + rank))])

    assert sentence(found) == (
        "workers w0 and w1 have models or registered objects of different structure, first in weight"
        " (torch.float32(2,) and torch.float32(3,)): build the same in every worker"
    )


def test_entries_of_different_names_are_an_error_that_names_the_first() -> None:
    found = equalised(lambda rank: [Leaf(f"weight{rank // 2}", torch.ones(2))])

    assert sentence(found) == (
        "workers w0 and w2 have models or registered objects of different structure, first in weight0"
        " (which w2 does not have there): build the same in every worker"
    )


def test_a_worker_that_has_more_entries_is_named_too() -> None:
    found = equalised(lambda rank: [Leaf(f"weight{index}", torch.ones(2)) for index in range(2 + (rank == 1))])

    assert sentence(found) == (
        "workers w0 and w1 have models or registered objects of different structure, first in weight2"
        " (which w0 does not have there): build the same in every worker"
    )


def checked(conditions_of: Callable[[int], Conditions]) -> list[Any]:
    return together(3, lambda group: check_conditions(group, IDS, conditions_of(group.rank)))


def test_equal_conditions_pass() -> None:
    assert checked(lambda _: HERE) == [None] * 3


@pytest.mark.parametrize(
    ("key", "value"),
    [("device", "NVIDIA H100"), ("torch_version", "1.0"), ("num_threads", 64), ("deterministic", True)],
)
def test_a_condition_that_differs_is_named_with_both_values(key: str, value: Any) -> None:
    found = checked(lambda rank: msgspec.structs.replace(HERE, **{key: value}) if rank == 1 else HERE)

    assert sentence(found) == (
        f"worker w1 has {key}={value!r} and w0 has {getattr(HERE, key)!r}:"
        " results would depend on which worker computes what; make them the same"
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"seed": 1, "microbatches": 4}, "seed=1 and w0 has 0"),
        ({"seed": 0, "microbatches": 4, "samples": 9}, "samples=9 and w0 has None"),
        ({"seed": 0}, "microbatches=None and w0 has 4"),
    ],
)
def test_a_setting_that_differs_or_is_missing_is_named_with_both_values(settings: dict[str, Any], told: str) -> None:
    found = checked(lambda rank: msgspec.structs.replace(HERE, settings=settings) if rank == 2 else HERE)

    assert sentence(found) == (
        f"worker w2 has {told}: every worker must pass the same to job.steps, and every host the same to craft run"
    )
