"""A training state that leaves one worker's objects arrives in another's, bit for bit, or the user is told what did not."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.protocol.errors import ConfigError, SnapshotCorrupt
from craft.snapshots.state.index import ByteLayout, TensorEntry
from craft.snapshots.state.raw_memory import same_bits
from craft.snapshots.state.serialized import State, decode_header, encode_header, load, stripe_of

from ..jobs import BUILDS, Job
from ..travel import Registered, moved


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", BUILDS)
def test_a_worker_that_loads_a_state_goes_on_like_the_one_that_gave_it(name: str, steps: int) -> None:
    """P1: whatever is registered, and whether or not it has a state yet."""
    donor, joiner = (Job(BUILDS[name], seed, torch.float32) for seed in (1, 2))
    for number in range(steps):
        donor.step(number)

    fetched = moved(State(donor.modules, donor.items, b""), joiner.modules, of=2)
    load(fetched.header, fetched.tensors, joiner.modules, joiner.items)

    assert joiner.digest() == donor.digest()
    for number in range(steps, steps + 3):
        donor.step(number)
        joiner.step(number)
    assert joiner.digest() == donor.digest()
    # A worker that joined is a donor like any other.
    assert State(joiner.modules, joiner.items, b"").header == State(donor.modules, donor.items, b"").header


def half_precision_with_exact_moments(model: torch.nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), foreach=False, capturable=True)
    for param in model.parameters():
        optimizer.state[param] = {
            "step": torch.tensor(3, dtype=torch.int64),
            "exp_avg": torch.rand(param.shape) + 2**-20,
            "exp_avg_sq": torch.rand(param.shape),
            "notes": ["a", ("b", torch.rand(2, dtype=torch.float64))],
            "text": "which torch would turn into something else",
        }
    return {"optimizer": optimizer}


def test_state_of_an_optimizer_keeps_the_types_that_torch_would_cast() -> None:
    donor, joiner = (Job(half_precision_with_exact_moments, seed, torch.bfloat16) for seed in (1, 2))

    fetched = moved(State(donor.modules, donor.items, b""))
    load(fetched.header, fetched.tensors, joiner.modules, joiner.items)

    assert joiner.digest() == donor.digest()
    state = joiner.items["optimizer"].state[joiner.model[3].weight]
    assert state["step"].dtype == torch.int64
    assert state["exp_avg"].dtype == torch.float32
    assert state["notes"][1][1].dtype == torch.float64
    assert state["text"] == "which torch would turn into something else"


def test_state_of_an_optimizer_keeps_its_order_in_memory() -> None:
    """The kernels of another order may round differently."""
    donor, joiner = (Job(BUILDS["adamw"], seed, torch.float32) for seed in (1, 2))
    donor.step(0)

    fetched = moved(State(donor.modules, donor.items, b""))
    load(fetched.header, fetched.tensors, joiner.modules, joiner.items)

    mine, theirs = (job.items["optimizer"].state[job.model[0].weight]["exp_avg"] for job in (joiner, donor))
    assert mine.stride() == theirs.stride() != mine.contiguous().stride()


class Descent(torch.optim.Optimizer):
    """One of the script's own, without the settings that torch's have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def test_groups_that_are_added_to_an_optimizer_after_it_loaded_a_state_are_those_of_the_others() -> None:
    donor, joiner = (
        Job(lambda model: {"optimizer": Descent(list(model.parameters())[:2])}, seed, torch.float32) for seed in (1, 2)
    )

    fetched = moved(State(donor.modules, donor.items, b""))
    load(fetched.header, fetched.tensors, joiner.modules, joiner.items)
    for job in (donor, joiner):
        job.items["optimizer"].add_param_group({"params": list(job.model[3].parameters())})

    assert joiner.digest() == donor.digest()


def test_each_tensor_that_arrives_has_a_storage_of_its_own() -> None:
    """Saving one would otherwise write all of them to disk."""
    fetched = moved(State({}, {"item": Registered({"a": torch.rand(3), "b": torch.rand(1000)})}, b""))

    assert [tensor.untyped_storage().nbytes() for tensor in fetched.tensors] == [12, 4000]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in fetched.tensors)


def test_parameters_are_written_in_place_and_torch_counts_it() -> None:
    """Others hold the very tensors, and large buffers are taken as changed by this count alone."""
    donor, joiner = (Job(BUILDS["adamw"], seed, torch.float32) for seed in (1, 2))
    before = {name: (value.data_ptr(), value._version) for name, value in joiner.model.state_dict().items()}

    fetched = moved(State(donor.modules, donor.items, b""), joiner.modules)
    load(fetched.header, fetched.tensors, joiner.modules, joiner.items)

    for name, value in joiner.model.state_dict().items():
        pointer, version = before[name]
        assert value.data_ptr() == pointer
        assert value._version > version


def test_a_constant_that_is_the_same_memory_many_times_is_no_obstacle() -> None:
    models = []
    for _ in range(2):
        models.append(torch.nn.Linear(2, 2))
        models[-1].register_buffer("mask", torch.ones(1).expand(5))
    donor, joiner = models

    fetched = moved(State({"model": donor}, {}, b""), {"model": joiner})
    load(fetched.header, fetched.tensors, {"model": joiner}, {})

    assert torch.equal(joiner.weight, donor.weight)


TENSORS = [
    torch.rand(3, 4).t(),
    torch.rand(10)[::2],
    torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.rand(3, requires_grad=True),
    torch.rand(3, dtype=torch.complex64).conj(),
    torch.tensor(5),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.rand(4).to(torch.float8_e4m3fn),
    torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
    torch.ones(1).expand(3, 3),
    torch.rand(4, 1, 3)[:, :, 1:],
]


def test_tensors_of_every_form_arrive_with_their_bits() -> None:
    fetched = moved(State({}, {"item": Registered(TENSORS)}, b""), of=3)
    here = Registered([])

    load(fetched.header, fetched.tensors, {}, {"item": here})

    assert all(
        same_bits(mine, theirs.detach().resolve_conj()) for mine, theirs in zip(here.state, TENSORS, strict=True)
    )


class Forgetful(Registered):
    def load_state_dict(self, state: Any, /) -> None:
        self.state = {**state, "count": 0}


class Rounding(Registered):
    def load_state_dict(self, state: Any, /) -> None:
        self.state = {**state, "mean": state["mean"].half().float()}


class Raising(Registered):
    def load_state_dict(self, state: Any, /) -> None:
        raise KeyError("mean")


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (Forgetful, "load_state_dict of item does not restore what its state_dict gave, first in item.count"),
        (Rounding, "load_state_dict of item does not restore what its state_dict gave, first in item.mean"),
        (
            Raising,
            "load_state_dict of item does not take what state_dict of the workers that train gave: KeyError('mean')",
        ),
    ],
)
def test_an_object_that_does_not_restore_its_state_is_named(item: type[Registered], told: str) -> None:
    fetched = moved(State({}, {"item": Registered({"count": 3, "mean": torch.tensor(0.1)})}, b""))

    with pytest.raises(ConfigError) as caught:
        load(fetched.header, fetched.tensors, {}, {"item": item({})})

    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (torch.nn.Linear(2, 3), "model.weight, which is float32[3, 2] with strides [2, 1] here and float32[2, 2]"),
        (torch.nn.Linear(2, 2).double(), "model.weight, which is float64[2, 2]"),
        (torch.nn.Linear(2, 2, bias=False), "what is missing here, where they have model.bias"),
        (torch.nn.BatchNorm1d(2), "model.weight, which is float32[2]"),
    ],
)
def test_a_module_that_was_built_differently_is_refused(other: torch.nn.Module, told: str) -> None:
    fetched = moved(State({"model": torch.nn.Linear(2, 2)}, {}, b""), {"model": other})

    with pytest.raises(ConfigError) as caught:
        load(fetched.header, fetched.tensors, {"model": other}, {})

    assert f"first in {told}" in str(caught.value)


def test_something_else_registered_is_refused() -> None:
    fetched = moved(State({}, {"one": Registered(1), "two": Registered(2)}, b""))

    with pytest.raises(ConfigError, match="one is registered here, and one, two on the workers that train"):
        load(fetched.header, fetched.tensors, {}, {"one": Registered(1)})


def test_the_conditions_arrive_as_they_were_given() -> None:
    assert moved(State({}, {}, b"\x00whatever")).header.conditions == b"\x00whatever"


@given(st.integers(0, 1 << 40), st.integers(1, 17))
def test_stripes_are_everything_once(total: int, of: int) -> None:
    stripes = [stripe_of(total, part, of) for part in range(of)]

    assert stripes[0][0] == 0 and stripes[-1][1] == total
    assert all(mine[1] == following[0] for mine, following in itertools.pairwise(stripes))
    assert all(begin <= end for begin, end in stripes)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_pieces_cover_a_range_once(sizes: list[int], data: st.DataObject) -> None:
    layout = ByteLayout([TensorEntry(f"t{size}", "uint8", (size,), (1,)) for size in sizes])
    begin = data.draw(st.integers(0, layout.total_bytes))
    end = data.draw(st.integers(begin, layout.total_bytes))
    row = [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]

    covered = [(index, byte) for index, first, last in layout.pieces(begin, end) for byte in range(first, last)]

    assert covered == row[begin:end]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"total_bytes": 15}, "contradicts itself"),
        ({"module_entries": 3}, "contradicts itself"),
        ({"entries": (TensorEntry("w", "float31", (2, 2), (2, 1)),)}, "no tensor has the form"),
        ({"entries": (TensorEntry("w", "float32", (2, -2), (2, 1)),)}, "no tensor has the form"),
        ({"entries": (TensorEntry("w", "float32", (2, 2), (1,)),)}, "no tensor has the form"),
        ({"entries": (TensorEntry("w", "float32", (2, 2), (1, 1)),)}, "no tensor has the form"),
    ],
)
def test_a_header_that_cannot_be_is_refused(change: dict[str, Any], told: str) -> None:
    header = State({"model": torch.nn.Linear(2, 2, bias=False)}, {}, b"").header

    with pytest.raises(SnapshotCorrupt, match=told):
        decode_header(encode_header(msgspec.structs.replace(header, **change)))
