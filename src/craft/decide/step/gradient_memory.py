"""Compute the memory that holds gradients until a step is committed.

Counted as ``worker/reduce/accumulator.py`` works: the fewest nodes of the tree, one leaf being computed, one node that it
completes; also the result, and buffers for what others send. Where sent nodes need not stay on the device, the result
replaces the last node.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from craft.decide.step.plan import plan, share_of
from craft.decide.step.tree import Node, cover, parent_of

Hold = Literal["device", "host", "recompute"]
"""Where sent nodes are held: on the device, in pinned host memory, or nowhere."""

BYTES = {"float64": 8, "fp64": 8, "float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bfloat16": 2, "bf16": 2}
"""Bytes per element, by type name."""


class GradientMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in copies of the gradient, for the worker that needs most."""

    nodes: int
    """Sums of microbatches that are held, including the one being computed."""
    inbox: float
    """Buffers for the blocks of others, in the chunk that this worker sums."""
    overlaid: int
    """Nodes and the result, where it replaces the last node."""
    blocks: int
    """Nodes that are sent."""
    result: int = 1

    @property
    def apart(self) -> int:
        """Nodes and the result beside them: the cost of holding on the device."""
        return self.nodes + self.result


def held(num_microbatches: int, num_workers: int) -> GradientMemory:
    """Return the memory for each of ``num_workers``, in an undisturbed step."""
    owners = plan(num_microbatches, num_workers)
    shares = [share_of(owners, rank) for rank in range(num_workers)]
    blocks = [len(cover(share, num_microbatches)) for share in shares]
    parts = 1 if num_workers <= 2 else num_workers
    inbox = max(sum(blocks) - own for own in blocks) / parts if num_workers > 1 else 0.0
    most = [_most_nodes(share, num_microbatches) for share in shares]
    return GradientMemory(
        nodes=max(max(before, last) for before, last in most),
        inbox=inbox,
        overlaid=max(max(before + 1, last) for before, last in most),
        blocks=max(blocks),
    )


def _most_nodes(share: tuple[int, ...], num_microbatches: int) -> tuple[int, int]:
    """Return the most nodes held at once, before the last microbatch of a share and in it."""
    before, last, nodes = 0, 0, set[Node]()
    for microbatch in share:
        node, siblings = (microbatch, microbatch + 1), []
        while (above := parent_of(node, num_microbatches)) is not None and above[1] in nodes:
            node, sibling = above
            siblings.append(sibling)
        before, last = max(before, last), len(nodes) + (2 if siblings else 1)
        nodes = nodes.difference(siblings) | {node}
    return before, last
