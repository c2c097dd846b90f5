"""Which part of a microbatch each position of a replica computes."""

from __future__ import annotations

import pytest

from craft.protocol.errors import ConfigError
from craft.worker.data.data_split import WHOLE, DataSplit, split_of


def parts(size: int, names: tuple[str, ...] | None = None, **dimensions: int) -> list[DataSplit]:
    return [split_of(position, size, dimensions, names) for position in range(size)]


def test_samples_are_divided_over_the_shard_dimension_and_the_same_on_tensor_parallel_positions() -> None:
    found = parts(4, shard=2, tp=2)

    assert [(each.part, each.parts) for each in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [each.mates for each in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    samples = list(range(8))
    assert [list(each.of(samples)) for each in found] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_positions_with_the_same_samples_have_the_same_random_numbers_and_others_do_not() -> None:
    assert [each.lane for each in parts(4, shard=2, tp=2)] == [(0,), (0,), (1,), (1,)]
    assert {each.lane for each in parts(2, tp=2)} == {()}


def test_several_data_dimensions_divide_once_each() -> None:
    found = parts(4, dp_shard=2, fsdp=2)

    assert [each.part for each in found] == [0, 1, 2, 3] and {each.mates for each in found} == {(0, 1, 2, 3)}


def test_a_script_names_other_dimensions_or_none() -> None:
    assert [each.part for each in parts(2, ("dp",), dp=2)] == [0, 1]
    assert [each.parts for each in parts(2, (), shard=2)] == [1, 1]


def test_a_worker_alone_computes_all_samples_with_or_without_a_mesh() -> None:
    assert split_of(0, 1, None, None) is WHOLE and WHOLE.of([1, 2, 3]) == [1, 2, 3]


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 samples, which 2 workers of a replica cannot divide evenly"):
        DataSplit(0, 2).of([1, 2, 3])
    with pytest.raises(ConfigError, match=r"before job\.mesh"):
        split_of(0, 2, None, None)
    with pytest.raises(ConfigError, match=r"names tp, but job\.mesh has the dimensions shard"):
        split_of(0, 2, {"shard": 2}, ("tp",))
