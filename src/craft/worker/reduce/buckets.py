"""Lay out the trainable parameters in flat buckets, the same on every worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from craft.snapshots.state.shards import local_of

_ALIGN = 16
"""Chunk boundaries fall on multiples of this many elements, so that every chunk is well aligned."""
_FIRST_BUCKET_BYTES = 1 << 20
_WORTH_OVERLAPPING_BYTES = 4 << 20
"""Below this, sending in parts during backward costs more than it saves."""


class Bucket:
    """Some parameters of one dtype and device, side by side in a flat tensor."""

    def __init__(self, index: int, params: Sequence[tuple[int, torch.nn.Parameter]]) -> None:
        self.index = index
        self.param_indices = [param_index for param_index, _ in params]
        self.params = [param for _, param in params]
        self._shapes = [local_of(param).shape for param in self.params]
        """Of what is here of sharded parameters."""
        self.dtype = self.params[0].dtype
        self.device = self.params[0].device
        self.offsets: list[int] = []
        offset = 0
        for shape in self._shapes:
            self.offsets.append(offset)
            offset += shape.numel()
        self.numel = offset

    def empty(self) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' views into ``flat``, in their shapes."""
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, self._shapes, strict=True)
        ]

    def chunk(self, rank: int, size: int) -> slice:
        """Return the part of the bucket whose sum rank ``rank`` of ``size`` computes."""
        share = -(-self.numel // size)
        share += -share % _ALIGN
        return slice(min(rank * share, self.numel), min((rank + 1) * share, self.numel))


class BucketLayout:
    """All buckets. Parameters go in reverse model order, which is about the order of backward."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], bucket_bytes: int, trainable: Sequence[bool] | None = None
    ) -> None:
        """``trainable`` overrides which parameters get gradients."""
        self.params = list(params)
        self.trainable = trainable_of(params) if trainable is None else tuple(trainable)
        self.buckets: list[Bucket] = []
        self.place: dict[int, tuple[int, int]] = {}
        """Index of a parameter -> (bucket, position in it)."""
        total = sum(local_of(param).nbytes for param, wanted in zip(params, self.trainable, strict=True) if wanted)
        first_bytes = min(bucket_bytes, _FIRST_BUCKET_BYTES if total > _WORTH_OVERLAPPING_BYTES else total)
        open_buckets: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.nn.Parameter]]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for index in reversed(range(len(self.params))):
            param = self.params[index]
            if not self.trainable[index]:
                continue
            kind = (param.dtype, param.device)
            limit = bucket_bytes if self.buckets else first_bytes
            size = local_of(param).nbytes
            if open_buckets.get(kind) and sizes[kind] + size > limit:
                self._close(open_buckets.pop(kind))
                sizes[kind] = 0
            open_buckets.setdefault(kind, []).append((index, param))
            sizes[kind] = sizes.get(kind, 0) + size
        for rest in open_buckets.values():
            self._close(rest)

    def _close(self, params: list[tuple[int, torch.nn.Parameter]]) -> None:
        bucket = Bucket(len(self.buckets), params)
        for position, (index, _) in enumerate(params):
            self.place[index] = (bucket.index, position)
        self.buckets.append(bucket)

    @property
    def on_device(self) -> bool:
        """Whether the gradients are on a GPU."""
        return any(bucket.device.type == "cuda" for bucket in self.buckets)

    def fits(self) -> bool:
        """Return whether the same parameters are trainable as when this layout was made."""
        return self.trainable == trainable_of(self.params)


def trainable_of(params: Sequence[torch.nn.Parameter]) -> tuple[bool, ...]:
    return tuple(param.requires_grad for param in params)


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return all parameters, shared ones once, in module order."""
    return list(dict.fromkeys(param for module in modules for param in module.parameters()))


def bitmap(flags: Sequence[bool | int]) -> bytes:
    """Return one bit per flag; the first is the lowest bit of the first byte."""
    bits = sum(1 << index for index, flag in enumerate(flags) if flag)
    return bits.to_bytes(-(-len(flags) // 8), "little")
