"""The binary tree over microbatches 0..M-1 along which every sum is taken.

A node is a half-open range ``(lo, hi)``. Its left child is the largest power of two smaller than the range, so that equal
shares of workers are full nodes where possible. The tree depends on M alone: who computes what changes the route of the
numbers, never the order in which they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def middle(lo: int, hi: int) -> int:
    """Return where the node ``(lo, hi)`` splits; it must have at least two leaves."""
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def parent_of(node: Node, num_microbatches: int) -> tuple[Node, Node] | None:
    """Return ``(parent, sibling)`` of a node, or None for the root."""
    lo, hi = 0, num_microbatches
    while (lo, hi) != node:
        mid = middle(lo, hi)
        left, right = (lo, mid), (mid, hi)
        if node == left:
            return (lo, hi), right
        if node == right:
            return (lo, hi), left
        lo, hi = left if node[0] < mid else right
    return None


def cover(held: Collection[int], num_microbatches: int) -> tuple[Node, ...]:
    """Return the fewest nodes that together are exactly ``held``, from left to right."""
    wanted = frozenset(held)

    def walk(lo: int, hi: int) -> tuple[Node, ...]:
        count = sum(1 for microbatch in range(lo, hi) if microbatch in wanted)
        if count == 0:
            return ()
        if count == hi - lo:
            return ((lo, hi),)
        mid = middle(lo, hi)
        return walk(lo, mid) + walk(mid, hi)

    return walk(0, num_microbatches) if num_microbatches else ()


def fold(
    parts: Mapping[Node, T],
    num_microbatches: int,
    add: Callable[[T, T], T],
) -> T | None:
    """Add ``parts`` along the tree; absent branches add nothing. None if nothing is present."""

    def walk(lo: int, hi: int) -> T | None:
        if (lo, hi) in parts:
            return parts[lo, hi]
        if hi - lo == 1:
            return None
        mid = middle(lo, hi)
        left, right = walk(lo, mid), walk(mid, hi)
        if left is None or right is None:
            return right if left is None else left
        return add(left, right)

    return walk(0, num_microbatches)
