"""The microbatch whose backward is in progress: its gradients, bucket by bucket, and the tree node that they complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from craft.decide.step.tree import Node
from craft.protocol.errors import ConfigError, UnsafeScript
from craft.snapshots.state.shards import is_sharded, local_of
from craft.worker.reduce.buckets import Bucket, BucketLayout, bitmap
from craft.worker.reduce.flats import Flats


class NodeHolder(Protocol):
    """Holds the nodes of the step in flight, and lends buffers for them: a ``GradientAccumulator``."""

    layout: BucketLayout
    nodes: dict[Node, Flats]

    def take(self) -> Flats:
        """Return buffers for a node."""

    def release(self, flats: Flats) -> None:
        """Take buffers back."""


class Leaf:
    """The microbatch whose backward is in progress."""

    def __init__(
        self,
        gradients: NodeHolder,
        microbatch: int,
        node: Node,
        siblings: Sequence[Node],
        expected: list[int] | None,
        flushed: Callable[[int], None] | None,
        lent: Flats | None,
        *,
        merges: bool,
    ) -> None:
        """``merges``: whether each bucket is added to the siblings' as soon as it is flushed."""
        self._gradients = gradients
        self._merges = merges
        self._layout = gradients.layout
        self.microbatch = microbatch
        self.node = node
        """The node that this microbatch completes: itself, or an ancestor whose other leaves are held."""
        self.siblings = siblings
        self.weight = 1.0
        self.digest = b""
        self.count = [0] * len(self._layout.params)
        self.late = False
        """Whether a gradient came after its bucket was flushed."""
        self.flats = gradients.take() if siblings or lent is None else lent
        self.merged = (lent or gradients.take()) if siblings else self.flats
        self._expected = expected
        self._flushed = flushed
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        """In the first microbatch: the gradients as autograd left them, with torch's version counters."""
        self._streams: set[torch.cuda.Stream] | None = set() if not merges and self._layout.on_device else None
        """Streams that gradients were computed on, where there may be several: FSDP2 reduces on a separate one."""
        self._done = [False] * len(self._layout.buckets)
        self._missing = [
            sum(expected[index] for index in bucket.param_indices) if expected is not None else -1
            for bucket in self._layout.buckets
        ]

    @property
    def present(self) -> bytes:
        """Bitmap of the parameters that got a gradient."""
        return bitmap(self.count)

    def arrived(self, index: int, bucket: int) -> None:
        """Count a gradient that autograd put into a parameter; flush its bucket if that is complete."""
        self.count[index] += 1
        if self._streams is not None:
            self._streams.add(torch.cuda.current_stream(self._layout.params[index].device))
        if self._expected is None:
            grad = self._layout.params[index].grad
            assert grad is not None
            self._left[index] = (grad, grad._version)
        if self._done[bucket]:
            self._add_late(index, bucket)
        elif self._expected is not None and self.count[index] <= self._expected[index]:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0 and (self._merges or not self._has_partial_sums(bucket)):
                self._flush(bucket)

    def _has_partial_sums(self, bucket: int) -> bool:
        """Return whether the workers of the replica add gradients of this bucket up when it is flushed.

        That waits for the end of the backward: a worker that has just joined does not know yet how many gradients to expect, and
        flushes all buckets there. The workers of a replica have to add in the same order.
        """
        return any(_is_partial(self._layout.params[index]) for index in self._layout.buckets[bucket].param_indices)

    @torch.no_grad()
    def _add_late(self, index: int, bucket: int) -> None:
        param = self._layout.params[index]
        view = self.flats.views[bucket][self._layout.place[index][1]]
        grad = _grad_of(param)
        assert grad is not None
        if self.weight == 0:
            # Weight 0: the flushed zeros are right.
            param.grad = None
            return
        if self.count[index] == 1:
            # Not added to the zeros that stand for an absent gradient: they would turn -0.0 into 0.0.
            torch.mul(grad, self.weight, out=view) if self.weight != 1.0 else view.copy_(grad)
        elif self.weight != 1.0:
            raise ConfigError(
                "a microbatch with step.weight(...) got gradients from more backward() calls than the one before it:"
                " call backward() once per microbatch, or equally often in each"
            )
        else:
            view.add_(grad)
        param.grad = None
        self.late = True

    @torch.no_grad()
    def close(self) -> None:
        """Flush the rest; sum a flushed bucket again if it changed since, from inputs that are intact."""
        self._check_untouched()
        self._await_streams()
        for bucket in range(len(self._done)):
            if not self._done[bucket]:
                self._flush(bucket)
            elif self.late and self._merges:
                self._merge(bucket)

    def merge(self) -> None:
        """Add all buckets to the siblings'."""
        for bucket in range(len(self._done)):
            self._merge(bucket)

    def release(self) -> None:
        """Return the buffers of a microbatch that is held no longer."""
        self._gradients.release(self.flats)
        if self.siblings:
            self._gradients.release(self.merged)

    def _check_untouched(self) -> None:
        """Raise UnsafeScript if the script changed a gradient of the first microbatch; in later ones a change has no effect."""
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
        self._await_streams()
        self._fill(bucket, self.flats.views[index])
        if self._merges:
            self._merge(index)
        self._done[index] = True
        if self._flushed is not None:
            self._flushed(index)

    def _await_streams(self) -> None:
        """Make the current stream wait for the gradients that were computed on other streams."""
        for stream in self._streams or ():
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)

    def _fill(self, bucket: Bucket, views: list[torch.Tensor]) -> None:
        """Move the bucket's gradients into their views; an absent one, or one of weight 0, is always +0.0."""
        sources = []
        for param, view in zip(bucket.params, views, strict=True):
            grad = _grad_of(param)
            if grad is not None and grad.is_sparse:
                raise ConfigError("sparse gradients are not supported: build the embedding with sparse=False")
            if grad is None or self.weight == 0:
                # Not multiplied: NaN would stay NaN.
                view.zero_()
            elif self.weight != 1.0:
                torch.mul(grad, self.weight, out=view)
            else:
                sources.append((view, grad))
            param.grad = None
        if sources:
            torch._foreach_copy_([view for view, _ in sources], [grad for _, grad in sources])

    def _merge(self, bucket: int) -> None:
        """Add the bucket to the siblings' up the tree, always left + right, into separate buffers."""
        part = self.flats.tensors[bucket]
        for sibling in self.siblings:
            other = self._gradients.nodes[sibling].tensors[bucket]
            left, right = (other, part) if sibling[0] < self.microbatch else (part, other)
            part = torch.add(left, right, out=self.merged.tensors[bucket])


def _grad_of(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient in ``p.grad``; of a sharded one, what is here, placed like the parameter."""
    grad = param.grad
    if grad is None or not is_sharded(grad):
        return grad
    if _is_partial(param):
        # Partial sums, as of norms in sequence parallel: the workers of the replica add them up now, each in the same order.
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return local_of(grad)


def _is_partial(param: torch.nn.Parameter) -> bool:
    """Return whether the gradient is placed in another way than the parameter: each worker has a part of a sum."""
    grad = param.grad
    return grad is not None and is_sharded(grad) and grad.placements != param.placements  # type: ignore[attr-defined]
