"""The whole training state as named leaves: tensors, and plain values beside them.

Enters: modules and whatever has ``state_dict``. Leaves: an ordered list of leaves, from which hashes are taken and tensors
are copied in place. Nothing is pickled: a value that is neither a tensor nor plain data is refused with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from blake3 import blake3

from craft.protocol.errors import ConfigError
from craft.snapshots.pace import num_hashing


class Stateful(Protocol):
    """Whatever can follow the job."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Leaf(msgspec.Struct, frozen=True):
    """One entry of the state: a tensor, or a plain value as JSON."""

    name: str
    value: torch.Tensor | bytes

    def data(self) -> tuple[bytes | memoryview, ...]:
        """The bytes that are hashed, dtype and shape included, in parts: a large tensor is not copied for it."""
        if isinstance(self.value, bytes):
            return (self.value,)
        tensor = self.value.detach()
        return f"{tensor.dtype}{tuple(tensor.shape)}".encode(), memoryview(tensor_bytes(tensor))


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """A tensor's bytes as a numpy array; shares its memory where it is a contiguous CPU tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def module_leaves(modules: Mapping[str, torch.nn.Module]) -> list[Leaf]:
    """Parameters and buffers, buffers that are not saved included."""
    leaves = []
    for prefix, module in modules.items():
        named = [*module.named_parameters(), *module.named_buffers()]
        leaves += [Leaf(f"{prefix}.{name}", tensor) for name, tensor in named]
    return leaves


def registered_leaves(registered: Mapping[str, Stateful]) -> list[Leaf]:
    """Everything in the ``state_dict`` of what the user registered.

    Except for what says of itself that it is ``beside_the_state``: it travels with it, and may be another in each worker.
    """
    counted = {name: item for name, item in registered.items() if not getattr(item, "beside_the_state", False)}
    return [leaf for name, item in counted.items() for leaf in _walk(name, item.state_dict())]


def _walk(name: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        yield Leaf(name, value)
    elif isinstance(value, Mapping):
        for key in value:
            yield from _walk(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{name}.{index}", item)
    else:
        yield Leaf(name, _plain(name, value))


def _plain(name: str, value: Any) -> bytes:
    if isinstance(value, float):
        # JSON would not tell -0.0 or NaN apart from others.
        return value.hex().encode()
    if value is None or isinstance(value, bool | int | str):
        return msgspec.json.encode(value)
    if isinstance(value, complex):
        return f"{value.real.hex()},{value.imag.hex()}".encode()
    if isinstance(value, bytes):
        return value
    if callable(value) or isinstance(value, type):
        return str(getattr(value, "__qualname__", type(value).__qualname__)).encode()
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain(name, value.item())
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and not value.dtype.hasobject:
        return f"{value.dtype}{value.shape}".encode() + bytes(value.tobytes())
    if isinstance(value, set | frozenset):
        return msgspec.json.encode(sorted(map(str, value)))
    raise ConfigError(
        f"{name} in the registered state is a {type(value).__qualname__}, which is neither a tensor nor plain data:"
        " leave it out of state_dict(), or turn it into tensors, numbers and strings there"
    )


def digest(leaves: list[Leaf]) -> str:
    """One hash over all leaves, names included."""
    hasher = blake3(max_threads=num_hashing())
    for leaf in sorted(leaves, key=lambda each: each.name):
        for parts in ((leaf.name.encode(),), leaf.data()):
            # With their length: the same bytes cut elsewhere are another state.
            hasher.update(sum(map(len, parts)).to_bytes(8, "little"))
            for part in parts:
                hasher.update(part)
    return str(hasher.hexdigest())


def digests(leaves: list[Leaf]) -> list[tuple[str, str]]:
    """A hash for each leaf, to find out which differs."""
    return [(leaf.name, str(_hasher_of(leaf.data()).hexdigest(length=16))) for leaf in leaves]


def _hasher_of(parts: Sequence[bytes | memoryview]) -> Any:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher


class _Piece(msgspec.Struct, frozen=True):
    leaf: Leaf
    begin: int
    end: int

    def data(self) -> torch.Tensor:
        """Its bytes, where they are."""
        assert isinstance(self.leaf.value, torch.Tensor)
        return self.leaf.value.detach().contiguous().view(-1).view(torch.uint8)[self.begin : self.end]


class RotatingDigest:
    """Hashes another slice of the state in each step, so that every byte has its turn within ``period`` steps."""

    _REFRESH_STEPS = 64
    """Walking the state costs more than hashing a slice of it: not oftener than this."""

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._slices: list[list[_Piece]] = []
        self._begins = 0

    @property
    def period(self) -> int:
        """Number of steps after which every byte was looked at."""
        return max(1, len(self._slices))

    def restart(self, step: int) -> None:
        """A new generation begins, or somebody begins to keep pace: all members begin anew at ``step``."""
        self._slices = []
        self._begins = step

    def due(self, step: int) -> bool:
        """Whether the state is to be walked again at ``step``; the same on all workers."""
        rounds = -(-self._REFRESH_STEPS // self.period)
        return self._slice_bytes > 0 and (
            step == self._begins or (step > self._begins and step % (rounds * self.period) == 0)
        )

    def refresh(self, leaves: list[Leaf]) -> None:
        """Cut the tensors of the state, as it is built now, into slices."""
        self._slices = []
        current: list[_Piece] = []
        room = self._slice_bytes
        for leaf in leaves:
            if isinstance(leaf.value, bytes):
                # A copy of what it was now, not a view of what it will be.
                continue
            size = _nbytes(leaf.value)
            begin = 0
            while begin < size:
                end = min(size, begin + room)
                current.append(_Piece(leaf, begin, end))
                room -= end - begin
                begin = end
                if room == 0:
                    self._slices.append(current)
                    current, room = [], self._slice_bytes
        if current:
            self._slices.append(current)

    def names(self, step: int) -> list[str]:
        """Which entries of the state are looked at in ``step``."""
        return [piece.leaf.name for piece in self._slices[step % self.period]] if self._slices else []

    def digest(self, step: int) -> bytes:
        """Hash of the slice whose turn it is."""
        return self.take(step)()

    def take(self, step: int) -> Callable[[], bytes]:
        """Look at the slice whose turn it is; what is returned gives its hash, as often as it is asked.

        What is on a device is only asked for now, and waited for then: nothing that the device has to do stands still.
        """
        if not self._slices:
            return bytes
        parts = [piece.data() for piece in self._slices[step % self.period]]
        if not any(part.is_cuda for part in parts):
            found = _hash(parts)
            return lambda: found
        on_host = [torch.empty(part.numel(), dtype=torch.uint8, pin_memory=True) for part in parts]
        for part, room in zip(parts, on_host, strict=True):
            room.copy_(part, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> bytes:
            copied.synchronize()
            return _hash(on_host)

        return wait


def _hash(parts: Sequence[torch.Tensor]) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(memoryview(part.numpy()))  # type: ignore[arg-type]
    return bytes(hasher.digest(length=8))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
