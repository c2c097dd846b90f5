"""Which elements of a whole tensor each worker of a mesh has: random shapes, meshes and placements, against torch and by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from craft.snapshots.state.regions import Region, fits, is_tiled, overlaps, region_of, shape_of, whole

Mesh = tuple[int, ...]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, tuple[Any, ...]]:
    """A shape, a mesh of up to three dimensions, and a placement for each of them."""
    shape = tuple(draw(st.lists(st.integers(0, 14), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placements = [draw(st.one_of(st.just(Replicate()), st.builds(Shard, dims))) for _ in sizes]
    return shape, sizes, tuple(placements)


def texts(placements: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(str, placements))


def regions(shape: tuple[int, ...], sizes: Mesh, placements: tuple[Any, ...]) -> list[Region]:
    found = [region_of(shape, sizes, each, texts(placements)) for each in itertools.product(*map(range, sizes))]
    return [each for each in found if each is not None]


def part_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for axis, ranges in enumerate(region):
        indices = [index for begin, end in ranges for index in range(begin, end)]
        tensor = tensor.index_select(axis, torch.tensor(indices, dtype=torch.long))
    return tensor


def chunk(tensor: torch.Tensor, parts: int, number: int) -> torch.Tensor:
    found = tensor.chunk(parts) if len(tensor) else ()
    return found[number] if number < len(found) else tensor[:0]


def copied(source: torch.Tensor, held: Region, wanted: Region) -> torch.Tensor:
    """What ``overlaps`` brings from a local tensor into another one; -1 elsewhere."""
    out = torch.full(shape_of(wanted), -1)
    for each in overlaps(wanted, held):
        place, part = out, source
        for axis, (begin, other, size) in enumerate(zip(each.begins, each.other_begins, each.sizes, strict=True)):
            place, part = place.narrow(axis, begin, size), part.narrow(axis, other, size)
        assert bool((place == -1).all())
        place.copy_(part)
    return out


@given(layouts())
def test_shapes_and_offsets_are_those_of_torch(layout: tuple[tuple[int, ...], Mesh, tuple[Any, ...]]) -> None:
    shape, sizes, placements = layout
    for coordinate in itertools.product(*map(range, sizes)):
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
        region = region_of(shape, sizes, coordinate, texts(placements))
        assert region is not None and shape_of(region) == tuple(local)
        if math.prod(local):
            assert tuple(ranges[0][0] for ranges in region) == tuple(offset)


@given(layouts(), layouts())
def test_a_tensor_is_put_together_again_from_its_shards_at_any_other_mesh(
    saved: tuple[tuple[int, ...], Mesh, tuple[Any, ...]], other: tuple[tuple[int, ...], Mesh, tuple[Any, ...]]
) -> None:
    shape, sizes, placements = saved
    tensor = torch.arange(math.prod(shape)).view(shape)
    held = list(dict.fromkeys(regions(shape, sizes, placements)))
    assert is_tiled(shape, held) and all(fits(shape, each) for each in held)
    new = tuple(each if str(each) == "R" or each.dim < len(shape) else Replicate() for each in other[2])
    for wanted in (whole(shape), *regions(shape, other[1], new)):
        out = torch.full(shape_of(wanted), -1)
        for each in held:
            out = torch.maximum(out, copied(part_of(tensor, each), each, wanted))
        assert torch.equal(out, part_of(tensor, wanted))


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_fsdp_of_what_tensor_parallel_divided_is_what_each_worker_has(size: int, shard: int, tp: int) -> None:
    """FSDP2 divides the local tensors of tensor parallel, also where that does not come out even."""
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    tensor, found = torch.arange(size), []
    for coordinate in itertools.product(range(shard), range(tp)):
        mine = chunk(chunk(tensor, tp, coordinate[1]), shard, coordinate[0])
        region = region_of((size,), (shard, tp), coordinate, texts(placements))
        assert region is not None and torch.equal(part_of(tensor, region), mine)
        found.append(region)
    assert is_tiled((size,), list(dict.fromkeys(found)))


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_shards_are_those_of_torch(size: int, parts: int, factor: int) -> None:
    """Where no later dimension of the mesh divides the same dimension of the tensor."""
    placement = _StridedShard(0, split_factor=factor)
    tensor = torch.arange(size)
    theirs, _ = placement._split_tensor(tensor, parts, with_padding=False)
    for number in range(parts):
        region = region_of((size,), (parts,), (number,), (str(placement),))
        assert region is not None and torch.equal(part_of(tensor, region), theirs[number])


def test_parts_of_sums_are_no_region() -> None:
    assert region_of((4,), (2,), (0,), ("P(sum)",)) is None


def test_regions_that_overlap_or_leave_gaps_are_no_tiling() -> None:
    assert not is_tiled((4,), [(((0, 3),),), (((2, 3),),)])
    assert not is_tiled((4,), [(((0, 2),),), (((3, 4),),)])
    assert not is_tiled((4,), [(((0, 2),),), (((1, 3),),)])
    assert is_tiled((0, 3), [((), ((0, 3),))])


def test_a_region_of_a_damaged_header_is_found() -> None:
    assert not fits((4,), (((0, 5),),))
    assert not fits((4,), (((2, 2),),))
    assert not fits((4, 4), (((0, 4),),))
