"""Plain values of a ``state_dict``, there and back again."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.protocol.errors import ConfigError
from craft.snapshots.state.serialized import State
from craft.snapshots.state.tree import Builder, Node, Packer

from ..travel import Registered


def through(value: Any, own: Any = None) -> Any:
    packer = Packer()
    node = packer.pack("item", value)
    node = msgspec.msgpack.decode(msgspec.msgpack.encode(node), type=Node)
    return Builder(packer.tensors).build("item", node, own)


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.text(),
    st.binary(),
    st.frozensets(st.one_of(st.integers(), st.text())),
)
keys = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(1 << 63), (1 << 63) - 1))
nested = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(keys, inner).map(OrderedDict),
    ),
)


def kinds(value: Any) -> Any:
    """A value with its types, and dicts with their order, so that 1 is not True and nothing is lost."""
    if isinstance(value, dict):
        return type(value), [(type(key), key, kinds(value[key])) for key in value]
    if isinstance(value, list | tuple):
        return type(value), [kinds(item) for item in value]
    return type(value), value


@given(nested)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert kinds(through(value)) == kinds(value)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_floats_come_back_bit_for_bit(first: int, second: int) -> None:
    real, imaginary = (struct.unpack("<d", bits.to_bytes(8, "little"))[0] for bits in (first, second))
    value = through([real, complex(real, imaginary)])

    assert struct.pack("<ddd", value[0], value[1].real, value[1].imag) == struct.pack("<ddd", real, real, imaginary)


@pytest.mark.parametrize(
    "value",
    [
        numpy.float32(0.1),
        numpy.int8(-3),
        numpy.bool_(True),
        numpy.datetime64("2020-02-02"),
        numpy.arange(6).reshape(2, 3),
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.array(3.5),
        numpy.empty((0, 3), dtype=numpy.complex64),
        numpy.array(["a", "bc"]),
        numpy.arange(10, dtype=">i4")[::3],
        numpy.broadcast_to(numpy.arange(2), (3, 2)),
    ],
)
def test_numpy_comes_back_with_its_type_and_shape(value: Any) -> None:
    back = through(value)

    assert type(back) is type(value)
    assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    if isinstance(value, numpy.ndarray) and value.ndim == 2 and value.flags.f_contiguous:
        assert back.flags.f_contiguous


def test_random_generators_of_numpy_and_python_travel() -> None:
    state = {"numpy": numpy.random.default_rng(5).bit_generator.state, "python": random.Random(5).getstate()}

    assert kinds(through(state)) == kinds(state)


def test_counters_and_defaultdicts_keep_their_kind_and_functions_are_the_receivers_own() -> None:
    value = {"count": Counter({3: 1}), "lists": defaultdict(list, {"a": [1]}), "call": math.sqrt}
    own = {"lists": defaultdict(list), "call": math.sqrt}

    back = through(value, own)

    assert kinds(back["count"]) == kinds(value["count"])
    assert back["lists"].default_factory is list
    assert back["call"] is math.sqrt


def test_a_function_that_the_receiver_has_not_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        through({"call": math.sqrt}, {"call": math.cos})

    assert str(caught.value).startswith("item.call is sqrt on the workers that train, and <built-in function cos> here")


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Opaque(), "item.x in the registered state is a Opaque, which cannot be sent"),
        ({1.5: 0}, "item.x in the registered state has the key 1.5, a float"),
        ({True: 0}, "item.x in the registered state has the key True, a bool"),
        (numpy.array([Opaque()], dtype=object), "item.x in the registered state is an array of object"),
        (torch.eye(2).to_sparse(), "item.x is a tensor of torch.sparse_coo"),
        (torch.empty(1, device="meta"), "item.x is a tensor of torch.strided"),
        (
            torch.nn.utils.rnn.PackedSequence(torch.ones(1), torch.ones(1)),
            "item.x in the registered state is the named",
        ),
    ],
)
def test_what_cannot_travel_is_refused_by_name(value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        State({}, {"item": Registered({"x": value})}, b"")

    assert str(caught.value).startswith(told)
