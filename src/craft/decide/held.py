"""What it costs in memory to hold gradients until a step is committed.

Counted as ``worker/gradients.py`` goes about it: the fewest nodes of the tree, one leaf in the making, one node that it
completes; and beside these the result, and room for what others send.
"""

from __future__ import annotations

import msgspec

from craft.decide.plan import plan, share_of
from craft.decide.tree import Node, cover, parent_of

BYTES = {"float64": 8, "fp64": 8, "float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bfloat16": 2, "bf16": 2}
"""Of an element, by the names of types."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """In copies of the whole gradient, for the worker that needs most."""

    nodes: int
    """Sums of microbatches that are held, the one in the making included."""
    inbox: float
    """Room for the blocks of others, in the chunk that this worker sums."""
    result: int = 1

    @property
    def on_device(self) -> float:
        """All of it."""
        return self.nodes + self.inbox + self.result

    @property
    def pinned(self) -> tuple[float, float]:
        """(on the device, in pinned host memory) if finished nodes went there: the leaf in the making stays."""
        return 1 + self.inbox + self.result, float(self.nodes)

    @property
    def recompute(self) -> float:
        """If a retry computed everything again: the tree needs its nodes, but the result could take the place of one."""
        return self.nodes + self.inbox


def held(num_microbatches: int, num_workers: int) -> Held:
    """What holding costs each of ``num_workers``, in an undisturbed step."""
    owners = plan(num_microbatches, num_workers)
    shares = [share_of(owners, rank) for rank in range(num_workers)]
    blocks = [len(cover(share, num_microbatches)) for share in shares]
    parts = 1 if num_workers <= 2 else num_workers
    inbox = max(sum(blocks) - own for own in blocks) / parts if num_workers > 1 else 0.0
    return Held(nodes=max(_most_nodes(share, num_microbatches) for share in shares), inbox=inbox)


def _most_nodes(share: tuple[int, ...], num_microbatches: int) -> int:
    most, nodes = 0, set[Node]()
    for microbatch in share:
        node, siblings = (microbatch, microbatch + 1), []
        while (above := parent_of(node, num_microbatches)) is not None and above[1] in nodes:
            node, sibling = above
            siblings.append(sibling)
        most = max(most, len(nodes) + (2 if siblings else 1))
        nodes = nodes.difference(siblings) | {node}
    return most
