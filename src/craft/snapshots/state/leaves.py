"""The training state as named leaves, tensors and plain values: an ordered list, which is hashed.

Nothing is pickled: a value that is neither a tensor nor plain data is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from blake3 import blake3

from craft.protocol.errors import ConfigError
from craft.snapshots.state.fingerprint import fingerprint
from craft.snapshots.state.shards import local_of
from craft.snapshots.store.background import num_hashing


class Stateful(Protocol):
    """An object that can follow the job."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Leaf(msgspec.Struct, frozen=True):
    """One entry of the state: a tensor, or a plain value as JSON."""

    name: str
    value: torch.Tensor | bytes

    def data(self) -> tuple[bytes | memoryview, ...]:
        """Yield the bytes to hash, dtype and shape included, without copying a large tensor."""
        if isinstance(self.value, bytes):
            return (self.value,)
        tensor = self.value.detach()
        return f"{tensor.dtype}{tuple(tensor.shape)}".encode(), tensor_bytes(tensor)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, which share the memory of a contiguous CPU tensor."""
    memory: Any = _bytes_of(tensor.detach().cpu()).numpy()
    return memoryview(memory)


def module_leaves(modules: Mapping[str, torch.nn.Module]) -> list[Leaf]:
    """Return parameters and buffers, including buffers that are not saved; of sharded ones, what is here."""
    leaves = []
    for prefix, module in modules.items():
        named = [*module.named_parameters(), *module.named_buffers()]
        leaves += [Leaf(f"{prefix}.{name}", local_of(tensor)) for name, tensor in named]
    return leaves


def registered_leaves(registered: Mapping[str, Stateful]) -> list[Leaf]:
    """Return everything in the ``state_dict`` of registered objects.

    Objects that declare themselves ``beside_the_state`` are left out: they travel with it, but may differ between workers.
    """
    counted = {name: item for name, item in registered.items() if not getattr(item, "beside_the_state", False)}
    return [leaf for name, item in counted.items() for leaf in _walk(name, item.state_dict())]


def _walk(name: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        yield Leaf(name, local_of(value))
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
        # JSON does not distinguish -0.0 or NaN.
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
    """Return one hash over all leaves, names included."""
    hasher = blake3(max_threads=num_hashing())
    for leaf in sorted(leaves, key=lambda each: each.name):
        for parts in ((leaf.name.encode(),), leaf.data()):
            # With their lengths: the same bytes divided differently are another state.
            hasher.update(sum(map(len, parts)).to_bytes(8, "little"))
            for part in parts:
                hasher.update(part)
    return str(hasher.hexdigest())


def digests(leaves: list[Leaf]) -> list[tuple[str, str]]:
    """Return a hash for each leaf, to find those that differ."""
    return [(leaf.name, hash_parts(leaf.data()).hex()) for leaf in leaves]


_SAMPLED = 1 << 10
"""Elements of each tensor."""


def sample_digest(leaves: list[Leaf]) -> bytes:
    """Return one hash over plain values and some elements of every tensor: it detects large differences."""
    values = (leaf.value if isinstance(leaf.value, bytes) else sampled(leaf.value, _SAMPLED) for leaf in leaves)
    return hash_parts(part for leaf, value in zip(leaves, values, strict=True) for part in (leaf.name.encode(), value))


def sampled(tensor: torch.Tensor, count: int) -> memoryview:
    """Return the bytes of about ``count`` elements that are spread over a tensor."""
    flat = tensor.detach().reshape(-1)
    return tensor_bytes(flat[:: max(1, flat.numel() // count)])


def hash_parts(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return one hash over all parts, of 16 bytes."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return bytes(hasher.digest(length=16))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, flat, on its device."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class _LeafPiece(msgspec.Struct, frozen=True):
    leaf: Leaf
    begin: int
    end: int

    def data(self) -> torch.Tensor:
        """Return its bytes, on their device."""
        assert isinstance(self.leaf.value, torch.Tensor)
        return _bytes_of(self.leaf.value)[self.begin : self.end]


STATE_IS_BUILT = 2
"""By this step optimizers have allocated their state: it has its final size, also for a joiner."""


class RotatingDigest:
    """Hashes another slice of the state in each step, so that every byte is covered within ``period`` steps.

    A large state has larger slices: ``period`` is at most 1,000.
    """

    _LONGEST = 1000
    _REFRESH_STEPS = 64
    """Walking the state costs more than hashing a slice, so that it is done at most this often."""

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._slices: list[list[_LeafPiece]] = []
        self._begins = 0

    @property
    def is_on(self) -> bool:
        """Whether anything of the state is hashed."""
        return self._slice_bytes > 0

    @property
    def period(self) -> int:
        """Number of steps that cover every byte."""
        return max(1, len(self._slices))

    def restart(self, step: int) -> None:
        """Begin anew at ``step`` on all members: a new generation begins, or a worker has caught up."""
        self._slices = []
        self._begins = step

    def due(self, step: int) -> bool:
        """Return whether to walk the state again at ``step``; the same on all workers."""
        rounds = -(-self._REFRESH_STEPS // self.period)
        return self._slice_bytes > 0 and (
            step in (self._begins, self._begins + STATE_IS_BUILT)
            or (step > self._begins and step % (rounds * self.period) == 0)
        )

    def is_whole(self, step: int) -> bool:
        """Return whether the slices of ``step`` cover all tensors: optimizers allocate theirs in the first steps."""
        return bool(self._slices) and step >= self._begins + STATE_IS_BUILT

    def refresh(self, leaves: list[Leaf]) -> bool:
        """Divide the current tensors of the state into slices; return whether they changed."""
        before, self._slices = self._slices, []
        current: list[_LeafPiece] = []
        # Plain values are copied as of now.
        tensors = [(leaf, leaf.value.nbytes) for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        slice_bytes = max(self._slice_bytes, -(-sum(size for _, size in tensors) // self._LONGEST))
        room = slice_bytes
        for leaf, size in tensors:
            begin = 0
            while begin < size:
                end = min(size, begin + room)
                current.append(_LeafPiece(leaf, begin, end))
                room -= end - begin
                begin = end
                if room == 0:
                    self._slices.append(current)
                    current, room = [], slice_bytes
        if current:
            self._slices.append(current)
        return _outline(before) != _outline(self._slices)

    def names(self, step: int) -> list[str]:
        """Return the entries of the state that ``step`` covers."""
        return [piece.leaf.name for piece in self._slices[step % self.period]] if self._slices else []

    def take(self, step: int) -> Callable[[], bytes]:
        """Start hashing the slice of ``step``; return a function that gives the hash.

        On a device the work is only enqueued now, and awaited later, so that the device never stalls.
        """
        if not self._slices:
            return bytes
        return hash_where_it_is([piece.data() for piece in self._slices[step % self.period]])


def _outline(slices: list[list[_LeafPiece]]) -> list[list[tuple[str, int, int]]]:
    return [[(piece.leaf.name, piece.begin, piece.end) for piece in pieces] for pieces in slices]


def whole_digest(leaves: list[Leaf]) -> Callable[[], bytes]:
    """Start hashing the whole state; return a function that gives the hash."""
    values = [leaf.value for leaf in leaves]
    plain = [
        torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in values if isinstance(each, bytes) and each
    ]
    tensors = [_bytes_of(each) for each in values if isinstance(each, torch.Tensor) and each.numel()]
    return hash_where_it_is([*plain, *tensors], max_threads=num_hashing())


def hash_where_it_is(parts: Sequence[torch.Tensor], max_threads: int = 1) -> Callable[[], bytes]:
    """Hash bytes on the host now, and those on a device there; return a function that waits for the result."""
    hasher = blake3(max_threads=max_threads)
    for part in parts:
        if not part.is_cuda:
            hasher.update(memoryview(part.numpy()))  # type: ignore[arg-type]
    on_device = [part for part in parts if part.is_cuda]
    if not on_device:
        found = bytes(hasher.digest(length=8))
        return lambda: found
    on_host = torch.empty(1, dtype=torch.int64, pin_memory=True)
    on_host.copy_(fingerprint(on_device, on_device[0].device), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> bytes:
        copied.synchronize()
        hasher.update(memoryview(on_host.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return bytes(hasher.digest(length=8))

    return functools.cache(wait)
