"""Collectives that compute: they combine in the order of positions, whatever the topology.

All members get the same bits. A tensor is combined in its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed

from craft.groups.group import P2P
from craft.groups.sharded.transfer import exchange, flat, others
from craft.protocol.errors import ConfigError

dist: Any = torch.distributed

SMALL_BYTES = 16 * 1024
"""Up to this, an all-reduce gathers whole tensors: one round of messages instead of two."""

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Reduction:
    """How values of the members are combined: one of torch's ``ReduceOp``."""

    def __init__(self, op: Any, size: int, dtype: torch.dtype) -> None:
        self._factor: Any
        kind, self._factor = (op, None) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
        self._kind = str(kind.name)
        self._size = size
        if self._kind not in _COMBINE:
            raise ConfigError(f"a sharded replica has no reduction {self._kind}; it has {', '.join(_COMBINE)}")
        is_float = dtype.is_floating_point or dtype.is_complex
        if self._kind in ("AVG", "PREMUL_SUM") and not is_float:
            raise ConfigError(f"{self._kind} of {dtype} is not exact; use SUM, and divide the result")
        if self._kind in ("BAND", "BOR", "BXOR") and is_float:
            raise ConfigError(f"{self._kind} combines bits of integers and bool, not of {dtype}")
        self._combine = _COMBINE[self._kind]

    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this member contributes; ``tensor`` stays as it is."""
        return tensor * self._factor if self._kind == "PREMUL_SUM" else tensor

    def combine(self, parts: Sequence[torch.Tensor], own: int, out: torch.Tensor) -> None:
        """Write the result of all parts, in their order; use the received ones as scratch memory.

        ``out`` may be the memory of ``parts[own]``: it is written last.
        """
        result = parts[0]
        for index, part in enumerate(parts[1:], start=1):
            if index == len(parts) - 1:
                self._combine(result, part, out=out)
            else:
                result = self._combine(result, part, out=part if own == 0 and index == 1 else result)
        if len(parts) == 1:
            out.copy_(result)
        if self._kind == "AVG":
            out.div_(self._size)

    def echo(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Combine copies of what this member contributes."""
        own = self.prepare(tensor)
        self.combine([own if index == 0 else own.clone() for index in range(self._size)], 0, out)


class AllReduce:
    """Every member receives the combination of all."""

    name = "all_reduce"

    def __init__(self, tensor: torch.Tensor, op: Any, size: int) -> None:
        self.outputs = (tensor,)
        self._reduction = Reduction(op, size, tensor.dtype)

    def live(self, peers: P2P) -> None:
        with flat(self.outputs[0]) as out:
            tensor = self._reduction.prepare(out)
            if tensor.nbytes <= SMALL_BYTES:
                _all_gather_and_combine(peers, self._reduction, tensor, out)
            else:
                _scatter_and_gather(peers, self._reduction, tensor, out)

    def echo(self) -> None:
        self._reduction.echo(self.outputs[0], self.outputs[0])


def _all_gather_and_combine(peers: P2P, reduction: Reduction, tensor: torch.Tensor, out: torch.Tensor) -> None:
    parts = _parts(peers, tensor)
    sends = [(tensor, peer) for peer in others(peers)]
    exchange(peers, sends, [(parts[peer], peer) for peer in others(peers)])
    reduction.combine(parts, peers.rank, out)


def _scatter_and_gather(peers: P2P, reduction: Reduction, tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Combine one chunk per member, then gather the chunks: each byte crosses the network as often as in a ring."""
    chunks = tensor.tensor_split(peers.size)
    results = out.tensor_split(peers.size)
    parts = _parts(peers, chunks[peers.rank])
    exchange(
        peers,
        [(chunks[peer], peer) for peer in others(peers)],
        [(parts[peer], peer) for peer in others(peers)],
    )
    own = results[peers.rank]
    reduction.combine(parts, peers.rank, own)
    exchange(
        peers,
        [(own, peer) for peer in others(peers)],
        [(results[peer], peer) for peer in others(peers)],
    )


def _parts(peers: P2P, own: torch.Tensor) -> list[torch.Tensor]:
    """Return memory for the part of each member; this one's is ``own``."""
    shape = own.shape
    return [own if rank == peers.rank else own.new_empty(shape) for rank in range(peers.size)]


class ReduceScatter:
    """Each member receives the combination of what all have for it."""

    name = "reduce_scatter"

    def __init__(self, output: torch.Tensor, tensors: Sequence[torch.Tensor], op: Any, rank: int) -> None:
        """Take one tensor per member."""
        self.outputs = (output,)
        self._tensors = tensors
        self._rank = rank
        self._reduction = Reduction(op, len(tensors), output.dtype)

    def live(self, peers: P2P) -> None:
        tensors = [self._reduction.prepare(tensor) for tensor in self._tensors]
        output = self.outputs[0]
        parts = _parts(peers, tensors[self._rank].reshape(output.shape))
        exchange(
            peers,
            [(tensors[peer], peer) for peer in others(peers)],
            [(parts[peer], peer) for peer in others(peers)],
        )
        self._reduction.combine(parts, self._rank, output)

    def echo(self) -> None:
        output = self.outputs[0]
        self._reduction.echo(self._tensors[self._rank].reshape(output.shape), output)


class Reduce:
    """The root receives the combination of all; the others keep what they have."""

    name = "reduce"

    def __init__(self, tensor: torch.Tensor, op: Any, root: int, rank: int, size: int) -> None:
        self.outputs = (tensor,) if rank == root else ()
        self._tensor = tensor
        self._root = root
        self._reduction = Reduction(op, size, tensor.dtype)

    def live(self, peers: P2P) -> None:
        own = self._reduction.prepare(self._tensor)
        if not self.outputs:
            exchange(peers, [(own, self._root)], ())
            return
        parts = _parts(peers, own)
        exchange(peers, (), [(parts[peer], peer) for peer in others(peers)])
        self._reduction.combine(parts, peers.rank, self._tensor)

    def echo(self) -> None:
        for output in self.outputs:
            self._reduction.echo(self._tensor, output)
