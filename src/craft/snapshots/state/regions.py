"""Which elements of a whole tensor a worker of a replica has. Pure, no torch.

A *region* lists, for each dimension, the ranges of indices that a local tensor holds, in its order. Regions of one tensor are
recorded in checkpoints, so that a reader needs to know nothing of meshes and placements.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

Ranges = tuple[tuple[int, int], ...]
"""Ranges of indices, each from its first to behind its last; together in the order of the local tensor."""
Region = tuple[Ranges, ...]
"""One for each dimension."""

_SHARD = re.compile(r"S\((-?\d+)\)")
_STRIDED = re.compile(r"_S\((-?\d+), (\d+)\)")


class Overlap(NamedTuple):
    """A box that two local tensors of one whole tensor have in common."""

    sizes: tuple[int, ...]
    begins: tuple[int, ...]
    """Its first element in the first of the two."""
    other_begins: tuple[int, ...]
    """And in the second."""


@functools.lru_cache(maxsize=4096)
def region_of(
    shape: tuple[int, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[str, ...]
) -> Region | None:
    """Return what a worker at ``coordinate`` of a mesh of these sizes holds; ``placements`` as torch writes them.

    None: the elements are not those of the whole tensor, for example sums that are not complete.
    """
    region: list[Ranges] = [((0, size),) if size else () for size in shape]
    late: list[tuple[int, int]] = []
    for dim, text in enumerate(placements):
        if text == "R":
            continue
        strided = _STRIDED.fullmatch(text)
        found = strided or _SHARD.fullmatch(text)
        if found is None:
            return None
        axis = int(found.group(1)) % max(1, len(shape))
        if strided is None:
            region[axis] = _chunk(region[axis], sizes[dim], coordinate[dim])
        elif int(strided.group(2)) == _later_shards(placements, sizes, dim, axis):
            # FSDP2 divides what tensor parallel left of a dimension, though its dimension of the mesh comes first. As torch
            # writes that, a few uneven sizes come out differently from what each worker has.
            late.append((dim, axis))
        else:
            region[axis] = _interleaved(region[axis], int(strided.group(2)), sizes[dim], coordinate[dim])
    for dim, axis in reversed(late):
        region[axis] = _chunk(region[axis], sizes[dim], coordinate[dim])
    return tuple(region)


def _later_shards(placements: Sequence[str], sizes: Sequence[int], dim: int, axis: int) -> int:
    """Return into how many parts later dimensions of the mesh divide a dimension of the tensor."""
    later = range(dim + 1, len(placements))
    return math.prod(sizes[each] for each in later if placements[each] == f"S({axis})")


def _chunk(ranges: Ranges, parts: int, number: int) -> Ranges:
    """Return one part of a dimension as ``torch.chunk`` divides it; some of the last parts may be empty."""
    total = _length(ranges)
    size = -(-total // parts)
    return _slice(ranges, min(total, number * size), min(total, (number + 1) * size))


def _interleaved(ranges: Ranges, factor: int, parts: int, number: int) -> Ranges:
    """Return one part of each of ``factor`` blocks."""
    found: list[tuple[int, int]] = []
    for block in range(factor):
        for begin, end in _chunk(_chunk(ranges, factor, block), parts, number):
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
    return tuple(found)


def _slice(ranges: Ranges, first: int, last: int) -> Ranges:
    found, begin = [], 0
    for low, high in ranges:
        end = begin + high - low
        if min(end, last) > max(begin, first):
            found.append((low + max(begin, first) - begin, low + min(end, last) - begin))
        begin = end
    return tuple(found)


def _length(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def whole(shape: Sequence[int]) -> Region:
    """Return the region of a worker that has all of a tensor."""
    return tuple(((0, size),) if size else () for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of the local tensor."""
    return tuple(map(_length, region))


def overlaps(first: Region, second: Region) -> Iterator[Overlap]:
    """Yield the boxes that two local tensors have in common."""
    for box in product(*(_common(mine, theirs) for mine, theirs in zip(first, second, strict=True))):
        yield Overlap(tuple(e[2] for e in box), tuple(e[0] for e in box), tuple(e[1] for e in box))


def _common(mine: Ranges, theirs: Ranges) -> list[tuple[int, int, int]]:
    """Return (begin here, begin there, size) of the common ranges of a dimension."""
    found, begin = [], 0
    for low, high in mine:
        other = 0
        for first, last in theirs:
            size = min(high, last) - max(low, first)
            if size > 0:
                found.append((begin + max(low, first) - low, other + max(low, first) - first, size))
            other += last - first
        begin += high - low
    return found


def is_tiled(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Return whether regions, all different, hold every element of a tensor exactly once."""
    full = [each for each in regions if math.prod(shape_of(each))]
    if sum(math.prod(shape_of(each)) for each in full) != math.prod(shape):
        return False
    pairs = ((one, other) for number, one in enumerate(full) for other in full[:number])
    return not any(True for one, other in pairs for _ in overlaps(one, other))


def fits(shape: Sequence[int], region: Region) -> bool:
    """Return whether a region, perhaps from a damaged file, lies within a tensor."""
    return len(region) == len(shape) and all(
        0 <= begin < end <= size for ranges, size in zip(region, shape, strict=True) for begin, end in ranges
    )
