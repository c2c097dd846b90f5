"""Gradients on their way from autograd into this worker's own buffers, where they are held until commit.

Enters: backward of the user's loss, through a hook on each parameter. Leaves: tree nodes, each the sum over some
microbatches, bucket by bucket. What is held is the fewest nodes that cover the microbatches computed here; the sum of a
node needs its children no more, so that memory does not grow with the number of microbatches.

A bucket is *flushed* when all its parameters have got as many gradients as in the last microbatch, so that its exchange can
begin while backward goes on. Where that guess was wrong (a second backward, a branch taken for the first time), the leaf
is put right and ``late`` tells that what was sent is not what is held.

What was sent is held on the device, or in host memory (``host_offload.py``), or nowhere and computed again.
On a device the result then takes the place of the last node: buffers of the result are *lent* to the microbatch that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from craft.decide.step.gradient_memory import Hold
from craft.decide.step.tree import Node, parent_of
from craft.protocol.errors import ConfigError, UnsafeScript
from craft.worker.reduce.buckets import Bucket, BucketLayout, bitmap
from craft.worker.reduce.host_offload import HostOffload


class Flats:
    """One flat tensor for each bucket, with the parameters' places in it."""

    def __init__(self, layout: BucketLayout, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """``tensors``: where they are there already."""
        self.tensors = [bucket.empty() for bucket in layout.buckets] if tensors is None else list(tensors)
        self.views = [bucket.views(flat) for bucket, flat in zip(layout.buckets, self.tensors, strict=True)]


class GradientAccumulator:
    """What this worker holds of the step in flight. The main thread owns it; the exchange thread reads flushed buckets."""

    def __init__(self, layout: BucketLayout, *, hooked: bool = True, hold: Hold = "device") -> None:
        """``hooked`` is false for one that takes part in exchanges without computing anything.

        ``hold``: where what was sent is held.
        """
        self.layout = layout
        self.nodes: dict[Node, Flats] = {}
        """What is held."""
        self.lets_go = hold == "recompute"
        """Whether what was sent is not held any more."""
        self.in_place = hold != "device" and layout.on_device
        """Whether the result is written over what was sent. On the CPU it is received while that is still being sent."""
        self.aside = HostOffload(layout.buckets[0].device) if hold == "host" and self.in_place else None
        self._pool: list[Flats] = []
        self._lent: Flats | None = None
        self._out = self._most_out = 0
        """Buffers from the pool that are in use, and the most that were in this step."""
        self._expected = [0] * len(layout.params)
        self._learned = False
        self._active: _Leaf | None = None
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
        """A microbatch of a step of ``size`` begins. ``flushed`` is called with each bucket that is ready to be sent.

        ``lent`` are the buffers in which its node is to be; they are not this one's own.
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
        self._active = _Leaf(self, microbatch, node, siblings, expected, flushed, lent)

    def weigh(self, weight: float) -> None:
        """Set the weight of the active microbatch; only before its backward."""
        leaf = self._leaf()
        if any(leaf.count):
            raise ConfigError(
                "step.weight(n) must be called before backward(): gradients of this microbatch are on their way"
            )
        leaf.weight = weight

    @property
    def weight(self) -> float:
        """Of the active microbatch."""
        return self._leaf().weight

    def finish(self, hasher: Callable[[Flats], bytes] | None = None) -> _Leaf:
        """The active microbatch ends: flush what is left and hold its node. ``hasher`` takes a digest of its own gradient."""
        leaf = self._leaf()
        leaf.close()
        if hasher is not None:
            leaf.digest = hasher(leaf.flats)
        # In this order: the exchange thread may look for the node at any moment, and must find it in one place or the other.
        self.nodes[leaf.node] = leaf.merged
        self._active = None
        if any(leaf.count):
            # One without any gradient, as when its stream has ended, says nothing about the next.
            self._expected = leaf.count
            self._learned = True
        for sibling in leaf.siblings:
            self.release(self.nodes.pop(sibling))
        if leaf.siblings:
            self.release(leaf.flats)
        return leaf

    def discard(self, hasher: Callable[[Flats], bytes] | None) -> bytes:
        """The active microbatch was computed only for the digest of its gradient, or not even that; nothing of it is held."""
        leaf = self._leaf()
        leaf.close()
        self._active = None
        self.release(leaf.flats)
        return hasher(leaf.flats) if hasher is not None else b""

    def find(self, node: Node) -> Flats:
        """The buffers of a node: held, or just being completed by the active microbatch. For the exchange thread, too."""
        leaf = self._active
        if leaf is not None and leaf.node == node:
            return leaf.merged
        return self.nodes[node]

    @torch.no_grad()
    def show(self) -> None:
        """Let the script see, in ``p.grad``, a copy of what its last microbatch gave: for code in the middle of a step."""
        leaf = self._active
        for index, param in enumerate(self.layout.params if leaf is not None else ()):
            if leaf is not None and leaf.count[index] and param.grad is None:
                bucket, place = self.layout.place[index]
                param.grad = leaf.flats.views[bucket][place].clone()

    def hold_empty(self, microbatch: int, size: int) -> _Leaf:
        """Hold a microbatch without data: every gradient is absent."""
        self.start(microbatch, size, None)
        return self.finish()

    def _leaf(self) -> _Leaf:
        assert self._active is not None, "no microbatch is active"
        return self._active

    def take(self) -> Flats:
        """Buffers for a node, from the pool where there are some."""
        self._out += 1
        self._most_out = max(self._most_out, self._out)
        return self._pool.pop() if self._pool else Flats(self.layout)

    def release(self, flats: Flats) -> None:
        """Whoever had these needs them no more."""
        if flats is not self._lent:
            self._out -= 1
            self._pool.append(flats)

    def fetch(self) -> None:
        """The step is taken up again: have what was sent on the device, in memory that no aborted exchange writes to."""
        if self.aside is None:
            return
        for node, flats in self.nodes.items():
            tensors = [self.aside.back(node, bucket, flat) for bucket, flat in enumerate(flats.tensors)]
            self.nodes[node] = Flats(self.layout, tensors)

    def drop(self) -> None:
        """The step is taken back, perhaps in the middle of a microbatch: nothing of it is held."""
        self._active = None
        self.nodes, self._pool, self._out = {}, [], 0
        if self.aside is not None:
            self.aside.clear()

    def clear(self) -> None:
        """The step is committed: nothing need be held any longer."""
        for flats in self.nodes.values():
            self.release(flats)
        self.nodes = {}
        # Enough for a step like this one; after a retry had needed more, let the rest go.
        del self._pool[self._most_out :]
        self._out = self._most_out = 0
        if self.aside is not None:
            self.aside.clear()


@torch.no_grad()
def hand_out(layout: BucketLayout, flats: Flats, present: bytes, scale: float) -> None:
    """Make ``p.grad`` of each parameter a view of the result; None where no microbatch gave a gradient."""
    bits = int.from_bytes(present, "little")
    for bucket, flat, views in zip(layout.buckets, flats.tensors, flats.views, strict=True):
        if scale != 1.0:
            flat.mul_(scale)
        for index, param, view in zip(bucket.param_indices, bucket.params, views, strict=True):
            param.grad = view if bits >> index & 1 else None


class _Leaf:
    """The microbatch whose backward is under way."""

    def __init__(
        self,
        gradients: GradientAccumulator,
        microbatch: int,
        node: Node,
        siblings: Sequence[Node],
        expected: list[int] | None,
        flushed: Callable[[int], None] | None,
        lent: Flats | None,
    ) -> None:
        self._gradients = gradients
        self._layout = gradients.layout
        self.microbatch = microbatch
        self.node = node
        """What this microbatch completes: itself, or an ancestor whose other leaves are held already."""
        self.siblings = siblings
        self.weight = 1.0
        self.digest = b""
        self.count = [0] * len(self._layout.params)
        self.late = False
        """A gradient came after its bucket was flushed."""
        self.flats = gradients.take() if siblings or lent is None else lent
        self.merged = (lent or gradients.take()) if siblings else self.flats
        self._expected = expected
        self._flushed = flushed
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        """In the first microbatch: the gradients as autograd left them, with torch's count of their changes."""
        self._done = [False] * len(self._layout.buckets)
        self._missing = [
            sum(expected[index] for index in bucket.param_indices) if expected is not None else -1
            for bucket in self._layout.buckets
        ]

    @property
    def present(self) -> bytes:
        """Bitmap over all parameters: which got a gradient."""
        return bitmap(self.count)

    def arrived(self, index: int, bucket: int) -> None:
        """Autograd has put a gradient into a parameter."""
        self.count[index] += 1
        if self._expected is None:
            grad = self._layout.params[index].grad
            assert grad is not None
            self._left[index] = (grad, grad._version)
        if self._done[bucket]:
            self._add_late(index, bucket)
        elif self._expected is not None and self.count[index] <= self._expected[index]:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._flush(bucket)

    @torch.no_grad()
    def _add_late(self, index: int, bucket: int) -> None:
        param = self._layout.params[index]
        view = self.flats.views[bucket][self._layout.place[index][1]]
        assert param.grad is not None
        if self.weight == 0:
            # Nothing of it counts: what was flushed is right.
            param.grad = None
            return
        if self.count[index] == 1:
            # Not added to the zeros that stand for an absent one: they would turn -0.0 into 0.0.
            torch.mul(param.grad, self.weight, out=view) if self.weight != 1.0 else view.copy_(param.grad)
        elif self.weight != 1.0:
            raise ConfigError(
                "a microbatch with a weight of its own got gradients from more backward() calls than the one before it:"
                " call backward() once per microbatch, or equally often in each"
            )
        else:
            view.add_(param.grad)
        param.grad = None
        self.late = True

    @torch.no_grad()
    def close(self) -> None:
        """Flush what is left; if a flushed bucket changed since, sum it again. What it was summed from is intact."""
        self._check_untouched()
        for bucket in range(len(self._done)):
            if not self._done[bucket]:
                self._flush(bucket)
            elif self.late:
                self._merge(bucket)

    def _check_untouched(self) -> None:
        """Raise UnsafeScript if the script changed a gradient of the first microbatch. In later ones that does nothing at all."""
        for index, (grad, version) in self._left.items():
            now = self._layout.params[index].grad
            if now is None or now is not grad or now._version != version:
                raise UnsafeScript(
                    f"a gradient of shape {tuple(grad.shape)} was changed, replaced or cleared inside the loop over"
                    " microbatches, after backward(): gradient clipping, scaler.unscale_ and zero_grad have no place there,"
                    " since gradients are taken out of p.grad while backward() goes on. Do it once per step, after the loop:"
                    " there p.grad is the mean over the global batch (a hook by p.register_hook works on each microbatch)"
                )
        self._left = {}

    @torch.no_grad()
    def _flush(self, index: int) -> None:
        bucket = self._layout.buckets[index]
        self._fill(bucket, self.flats.views[index])
        self._merge(index)
        self._done[index] = True
        if self._flushed is not None:
            self._flushed(index)

    def _fill(self, bucket: Bucket, views: list[torch.Tensor]) -> None:
        """Move the bucket's gradients into their places. An absent one, and one of weight 0, is +0.0, everywhere and always."""
        sources = []
        for param, view in zip(bucket.params, views, strict=True):
            if param.grad is not None and param.grad.is_sparse:
                raise ConfigError("sparse gradients are not supported: build the embedding with sparse=False")
            if param.grad is None or self.weight == 0:
                # Not multiplied: what is no number would stay none.
                view.zero_()
            elif self.weight != 1.0:
                torch.mul(param.grad, self.weight, out=view)
            else:
                sources.append((view, param.grad))
            param.grad = None
        if sources:
            torch._foreach_copy_([view for view, _ in sources], [grad for _, grad in sources])

    def _merge(self, bucket: int) -> None:
        """Add the bucket to those of the siblings, up the tree, always left + right, into buffers of its own."""
        part = self.flats.tensors[bucket]
        for sibling in self.siblings:
            other = self._gradients.nodes[sibling].tensors[bucket]
            left, right = (other, part) if sibling[0] < self.microbatch else (part, other)
            part = torch.add(left, right, out=self.merged.tensors[bucket])
