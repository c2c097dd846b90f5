"""A hash that is computed where the bytes are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.snapshots.state.fingerprint import fingerprint
from craft.snapshots.state.leaves import Leaf, RotatingDigest, whole_digest

CPU = torch.device("cpu")


def value_of(*parts: torch.Tensor) -> int:
    return int(fingerprint(parts, CPU))


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5), data=st.data())
def test_every_bit_counts(sizes: list[int], data: st.DataObject) -> None:
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    changed = [part.clone() for part in parts]
    which = data.draw(st.integers(0, len(sizes) - 1))
    changed[which][data.draw(st.integers(0, sizes[which] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert value_of(*parts) == value_of(*(part.clone() for part in parts)) != value_of(*changed)


def test_the_place_of_bytes_counts_also_in_large_tensors() -> None:
    large = torch.zeros(20 << 20, dtype=torch.uint8)
    first, second = large.clone(), large.clone()
    first[3], second[(8 << 20) + 3] = 1, 1
    assert len({value_of(large), value_of(first), value_of(second)}) == 3
    assert value_of(large[5 : 5 + (2 << 20)]) == value_of(large[: 2 << 20])


def test_a_large_state_is_covered_within_a_thousand_steps() -> None:
    rotating = RotatingDigest(16)
    rotating.refresh([Leaf("a", torch.zeros(100_003)), Leaf("b", torch.zeros(7, dtype=torch.bfloat16))])
    assert 990 <= rotating.period <= 1000


def test_the_hash_of_the_whole_state_has_plain_values_in_it() -> None:
    tensor = torch.arange(10.0)
    found = whole_digest([Leaf("a", tensor), Leaf("lr", b"0.1"), Leaf("none", torch.zeros(0))])()
    assert found == whole_digest([Leaf("a", tensor.clone()), Leaf("lr", b"0.1")])()
    assert found != whole_digest([Leaf("a", tensor), Leaf("lr", b"0.2")])()
    tensor[9] = -0.0
    assert found != whole_digest([Leaf("a", tensor), Leaf("lr", b"0.1")])()
