"""Accumulate gradients from autograd in this worker's buffers, and hold them until commit.

Input: backward of the user's loss, through a hook on each parameter. Output: tree nodes, each the sum over some microbatches,
bucket by bucket. The accumulator holds the fewest nodes that cover the microbatches computed here; the sum of a node no longer
needs its children, so memory does not grow with the number of microbatches.

A bucket is *flushed* when all its parameters have got as many gradients as in the last microbatch, so that its exchange can begin
during backward. If that guess was wrong (a second backward, a branch taken for the first time), the leaf is corrected and
``late`` shows that the sent data is not the held data.

Where a replica has several workers, a microbatch is a *leaf* until all of them are known to have computed it whole: before
``confirm`` it is added to nothing.

Sent data is held on the device, in host memory (``host_offload.py``), or not at all and computed again. In the last two cases, on
a device, the result replaces the last node: the result's buffers are *lent* to the microbatch that completes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from craft.decide.step.gradient_memory import Hold
from craft.decide.step.tree import Node, parent_of
from craft.protocol.errors import ConfigError
from craft.worker.reduce.backward import Leaf
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.host_offload import HostOffload


class GradientAccumulator:
    """Holds this worker's part of the step in flight. Owned by the main thread; the exchange thread reads flushed buckets."""

    def __init__(
        self, layout: BucketLayout, *, hooked: bool = True, hold: Hold = "device", confirms: bool = False
    ) -> None:
        """``hooked`` is false for an accumulator that takes part in exchanges without computing.

        ``hold``: where sent data is held. ``confirms``: a microbatch waits for ``confirm`` before it is added to others.
        """
        self.layout = layout
        self.nodes: dict[Node, Flats] = {}
        """The held nodes."""
        self.lets_go = hold == "recompute"
        """Whether sent data is no longer held."""
        self.in_place = hold != "device" and layout.on_device
        """Whether the result overwrites sent data. Not on the CPU: there it is received during the send."""
        self.aside = HostOffload(layout.buckets[0].device) if hold == "host" and self.in_place else None
        self._pool: list[Flats] = []
        self._lent: Flats | None = None
        self._out = self._most_out = 0
        """Buffers of the pool in use, and their maximum in this step."""
        self._expected = [0] * len(layout.params)
        self._learned = False
        self._active: Leaf | None = None
        self._confirms = confirms
        self._unconfirmed: Leaf | None = None
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(index))
            for index, param in enumerate(layout.params)
            if hooked and param.requires_grad
        ]

    def detach(self) -> None:
        """Remove the hooks: another layout takes over."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        bucket, _ = self.layout.place[index]

        def arrived(_: torch.Tensor) -> None:
            if self._active is not None:
                self._active.arrived(index, bucket)

        return arrived

    def start(
        self, microbatch: int, size: int, flushed: Callable[[int], None] | None, lent: Flats | None = None
    ) -> None:
        """Begin a microbatch of a step of ``size``; ``flushed`` is called with each bucket that is ready to send.

        ``lent`` are buffers for its node that belong to the caller.
        """
        self._lent = lent
        for param in self.layout.params:
            param.grad = None
        siblings = []
        node: Node = (microbatch, microbatch + 1)
        while (above := parent_of(node, size)) is not None and above[1] in self.nodes:
            node, sibling = above
            siblings.append(sibling)
        expected = self._expected if self._learned else None
        self._active = Leaf(self, microbatch, node, siblings, expected, flushed, lent, merges=not self._confirms)

    def weigh(self, weight: float) -> None:
        """Set the weight of the active microbatch; only before its backward."""
        leaf = self._leaf()
        if any(leaf.count):
            raise ConfigError(
                "step.weight(n) must be called before backward(): gradients of this microbatch are on their way"
            )
        leaf.weight = weight

    @property
    def before_backward(self) -> bool:
        """Whether a microbatch is active and has got no gradient yet."""
        return self._active is not None and not any(self._active.count)

    @property
    def weight(self) -> float:
        """Weight of the active microbatch."""
        return self._leaf().weight

    def finish(self, hasher: Callable[[Flats], bytes] | None = None) -> Leaf:
        """End the active microbatch: flush the rest and hold its node; ``hasher`` computes a digest of its gradient."""
        leaf = self._leaf()
        leaf.close()
        if hasher is not None:
            leaf.digest = hasher(leaf.flats)
        if self._confirms:
            self._unconfirmed, self._active = leaf, None
        else:
            self._hold(leaf)
        if any(leaf.count):
            # A microbatch without any gradient, as when its stream has ended, predicts nothing for the next.
            self._expected = leaf.count
            self._learned = True
        return leaf

    def _hold(self, leaf: Leaf) -> None:
        # In this order: the exchange thread may look for the node at any time, and must find it in one of the two.
        self.nodes[leaf.node] = leaf.merged
        self._active = None
        for sibling in leaf.siblings:
            self.release(self.nodes.pop(sibling))
        if leaf.siblings:
            self.release(leaf.flats)

    @torch.no_grad()
    def confirm(self) -> None:
        """Add the last microbatch to the others: every worker of the replica has computed it whole."""
        leaf, self._unconfirmed = self._unconfirmed, None
        if leaf is not None:
            leaf.merge()
            self._hold(leaf)

    def reject(self) -> None:
        """Drop the last microbatch, unless it was confirmed: some worker of the replica may not have it."""
        leaf, self._unconfirmed = self._unconfirmed, None
        if leaf is not None:
            leaf.release()

    def discard(self, hasher: Callable[[Flats], bytes] | None) -> bytes:
        """End the active microbatch without holding it; return the digest of its gradient, if wanted."""
        leaf = self._leaf()
        leaf.close()
        self._active = None
        self.release(leaf.flats)
        return hasher(leaf.flats) if hasher is not None else b""

    def find(self, node: Node) -> Flats:
        """Return the buffers of a node, held or being completed; also called by the exchange thread."""
        leaf = self._active
        if leaf is not None and leaf.node == node:
            return leaf.merged
        return self.nodes[node]

    @torch.no_grad()
    def show(self) -> None:
        """Copy the last microbatch's gradients into ``p.grad``, for script code in the middle of a step."""
        leaf = self._active
        for index, param in enumerate(self.layout.params if leaf is not None else ()):
            if leaf is not None and leaf.count[index] and param.grad is None:
                bucket, place = self.layout.place[index]
                param.grad = leaf.flats.views[bucket][place].clone()

    def hold_empty(self, microbatch: int, size: int) -> Leaf:
        """Hold a microbatch without data: every gradient is absent."""
        self.start(microbatch, size, None)
        return self.finish()

    def _leaf(self) -> Leaf:
        assert self._active is not None, "no microbatch is active"
        return self._active

    def take(self) -> Flats:
        """Return buffers for a node, from the pool if possible."""
        self._out += 1
        self._most_out = max(self._most_out, self._out)
        return self._pool.pop() if self._pool else Flats(self.layout)

    def release(self, flats: Flats) -> None:
        """Return buffers to the pool."""
        if flats is not self._lent:
            self._out -= 1
            self._pool.append(flats)

    def fetch(self) -> None:
        """Bring sent data back to the device, into memory that no aborted exchange writes to."""
        if self.aside is None:
            return
        for node, flats in self.nodes.items():
            tensors = [self.aside.back(node, bucket, flat) for bucket, flat in enumerate(flats.tensors)]
            self.nodes[node] = Flats(self.layout, tensors)

    def drop(self) -> None:
        """Drop everything held: the step is undone, perhaps in the middle of a microbatch."""
        self._active = self._unconfirmed = None
        self.nodes, self._pool, self._out = {}, [], 0
        if self.aside is not None:
            self.aside.clear()

    def clear(self) -> None:
        """Release everything held: the step is committed."""
        for flats in self.nodes.values():
            self.release(flats)
        self.nodes = {}
        # Keep enough for a step like this one; free what only a retry needed.
        del self._pool[self._most_out :]
        self._out = self._most_out = 0
        if self.aside is not None:
            self.aside.clear()
