"""Tensors as raw memory: their bytes in memory order, and memory for new ones."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from craft.protocol.errors import ConfigError
from craft.snapshots.state.device_copy import PinnedMemory
from craft.snapshots.state.shards import local_of

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value not in (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2)
}
"""Every dtype by name, except of quantized tensors, whose bytes are not their value."""


def resolved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values, or raise ConfigError if there is none."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or is_traceable_wrapper_subclass(tensor)  # type: ignore[no-untyped-call,unused-ignore]
    ):
        raise ConfigError(
            f"{name} is a tensor of {tensor.layout} and type {type(tensor).__qualname__}: only plain dense tensors can be"
            " sent to a worker that joins"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor of this form fills its memory without gaps, each element once, in any order."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is dense, so that its memory order is preserved; otherwise a contiguous copy."""
    return tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()


def view_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense CPU tensor, to read from or write to."""
    memory: Any = memory_of(tensor).numpy()
    return memoryview(memory)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor in memory order; they share its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits, in any memory order; of sharded ones, what is here."""
    left, right = local_of(left), local_of(right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.data_ptr() == right.data_ptr() and left.stride() == right.stride() and left.device == right.device:
        return True
    if left.stride() != right.stride() or not is_dense(left.shape, left.stride()):
        left, right = left.contiguous(), right.contiguous()
    return torch.equal(memory_of(left), memory_of(right).to(left.device))


def room(size: int) -> PinnedMemory:
    """Allocate ``size`` bytes in large pages: the first touch of small ones costs more than the copy itself."""
    memory = PinnedMemory(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without large pages report so; small ones do.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def carve(memory: mmap.mmap, begin: int, size: int) -> torch.Tensor:
    """Return a tensor of ``size`` bytes in ``memory``, with a separate storage: saving it saves no other."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)
