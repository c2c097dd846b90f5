"""Module buffers: batch norm statistics and the like.

Every microbatch starts from the buffers that the step began with; after the step they are what microbatch 0 made of them. So they
depend neither on which worker computed what nor on the number of workers. Changes by code between the steps stay, as they do
without CRAFT: that code runs on every worker.

In ``job.attempts``, a graph may outlive its microbatch: a GAN's generator is run backward in the loop after the one that made its
pictures. Tensors that such a graph saved are not written to; the module gets another tensor in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from blake3 import blake3

from craft.protocol.errors import ConfigError

_HASHED_BYTES = 1 << 16
"""Buffers up to this size are hashed if code between the steps changed them; the state digest covers larger ones in turn."""
_MOST_HASHED = 256
"""At most this many have separate hashes; one hash stands for all others."""
_COMPARE_BYTES = 1 << 20
"""Larger buffers count as changed only if torch counted a change; smaller ones are compared (batch norm is not counted)."""


class ModuleBuffers:
    """The buffers of the replicated modules: as the step began with them, and as microbatch 0 left them."""

    def __init__(
        self, modules: Sequence[torch.nn.Module], names: Sequence[str] = (), *, graphs_live_on: bool = False
    ) -> None:
        """``names``: the job's names of the modules.

        ``graphs_live_on``: whether ``backward()`` of one microbatch may come in a later one, or after all of them.
        """
        self._modules = modules
        self._graphs_live_on = graphs_live_on
        self._set_aside: dict[int, torch.Tensor] = {}
        """Registered tensors that a graph holds, while the module has another one in their place."""
        self._aliased: frozenset[int] | None = None
        """Storages of buffers that modules know by a second name; None: not searched yet."""
        places: dict[int, _Place] = {}
        self._empty: list[_Place] = []
        """Places without a tensor. Non-persistent buffers may come and go, like plain attributes."""
        for number, root in enumerate(modules):
            job_name = f"{names[number]}." if names else ""
            for prefix, module in root.named_modules():
                for name, buffer in module._buffers.items():
                    place = _Place(module, name, f"{prefix}.{name}".lstrip("."), job_name)
                    if buffer is not None:
                        places.setdefault(id(buffer), place)
                    elif name not in module._non_persistent_buffers_set:
                        self._empty.append(place)
        self._places = list(places.values())
        self._tensors = [each for place in self._places if (each := place.get()) is not None]
        """The registered tensor of each place; a microbatch may put another tensor there, which ends with it."""
        self._committed = [_copy(each) for each in self._tensors]
        self._versions = [each._version for each in self._tensors]
        self._first: dict[int, torch.Tensor] = {}
        self._agreed = False
        """Whether a step was committed since this worker began or took its state: only since then all began alike."""
        self.touched: tuple[tuple[int, bytes], ...] | None = None
        """Hashes of buffers that code between the steps changed since the last commit; None where they cannot be compared."""

    def __len__(self) -> int:
        return len(self._places)

    def _changed(self) -> list[int]:
        """Return the buffers that differ from the step's beginning; all comparisons on a device cost one synchronization."""
        found = [self._differs(index) for index in range(len(self._places))]
        asked = [each for each in found if isinstance(each, torch.Tensor)]
        told = iter(torch.stack([each.to(asked[0].device) for each in asked]).tolist() if asked else ())
        return [index for index, each in enumerate(found) if (next(told) if isinstance(each, torch.Tensor) else each)]

    def _differs(self, index: int) -> bool | torch.Tensor:
        """Return whether a buffer changed; as a tensor, if only its device knows."""
        buffer, committed = self._places[index].get(), self._committed[index]
        if buffer is None or buffer.shape != committed.shape or buffer.dtype != committed.dtype:
            return True
        if _nbytes(buffer) > _COMPARE_BYTES:
            return buffer is not self._tensors[index] or buffer._version != self._versions[index]
        # As bits: a NaN equals itself, and -0.0 is not 0.0.
        if buffer.device.type == "cpu":
            return not torch.equal(_as_bytes(buffer), _as_bytes(committed))
        return (_as_bytes(buffer) != _as_bytes(committed)).any()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers that the step began with, before every microbatch."""
        for place in self._empty:
            if (buffer := place.get()) is not None:
                raise ConfigError(_became(place, None, buffer))
        for index, place in enumerate(self._places):
            # First the tensor itself: another one may belong to the graph of the microbatch that made it.
            place.put(self._tensors[index])
        for index in self._changed():
            self._take_committed(index)

    def _take_committed(self, index: int) -> None:
        if self._graphs_live_on and self._is_saved(self._tensors[index]):
            # A write would count as a modification, and a graph that reads the tensor must find its old values.
            self._set_aside.setdefault(index, self._tensors[index])
            self._tensors[index] = torch.empty_like(self._tensors[index])
            self._places[index].put(self._tensors[index])
        self._tensors[index].copy_(self._committed[index])
        self._versions[index] = self._tensors[index]._version

    def _is_saved(self, tensor: torch.Tensor) -> bool:
        """Return whether a graph holds ``tensor`` and no module has a second name for it, which would show old values."""
        if int(tensor._use_count()) == 1:  # type: ignore[attr-defined]
            return False
        if self._aliased is None:
            self._aliased = _aliased(self._modules)
        return _storage(tensor) not in self._aliased

    @torch.no_grad()
    def put_registered_back(self, *, graphs_are_done: bool) -> None:
        """Give modules their registered tensors back, with the current values: all, or those that no graph holds."""
        for index, registered in list(self._set_aside.items()):
            if not graphs_are_done and int(registered._use_count()) > 1:  # type: ignore[attr-defined]
                continue
            del self._set_aside[index]
            if self._places[index].get() is self._tensors[index]:
                registered.copy_(self._tensors[index])
                self._places[index].put(registered)
                self._tensors[index], self._versions[index] = registered, registered._version

    @torch.no_grad()
    def keep_first(self) -> None:
        """Keep the buffers as microbatch 0 left them; it was computed here."""
        self._first = {index: self._value(index) for index in self._changed()}

    def _value(self, index: int) -> torch.Tensor:
        """Return a copy of a buffer, of the shape and dtype that every worker expects."""
        buffer, committed, place = self._places[index].get(), self._committed[index], self._places[index]
        if buffer is None or buffer.shape != committed.shape or buffer.dtype != committed.dtype:
            raise ConfigError(_became(place, committed, buffer))
        return _copy(buffer)

    @property
    def changed(self) -> tuple[int, ...]:
        """Buffers that microbatch 0 changed; () unless it was computed here."""
        return tuple(self._first)

    def pack(self) -> torch.Tensor:
        """Return the buffers that microbatch 0 changed, as raw bytes in host memory."""
        values = list(self._first.values())
        if len({value.device for value in values}) > 1:
            values = [value.cpu() for value in values]
        return torch.cat([_as_bytes(value) for value in values]).cpu() if values else torch.empty(0)

    def empty_like(self, changed: tuple[int, ...]) -> torch.Tensor:
        """Allocate memory for another worker's ``pack`` of ``changed``."""
        return torch.empty(sum(_nbytes(self._committed[index]) for index in changed), dtype=torch.uint8)

    @torch.no_grad()
    def commit(self, changed: tuple[int, ...], packed: torch.Tensor | None) -> None:
        """Commit the buffers as microbatch 0 left them, on every worker."""
        self._first = {}
        self._agreed = True
        offset = 0
        for index in changed:
            assert packed is not None
            committed = self._committed[index]
            size = _nbytes(committed)
            _as_bytes(committed).copy_(packed[offset : offset + size])
            offset += size
            # Whether or not it changed here: this worker may have computed nothing.
            self._take_committed(index)
        self.restore()
        self.put_registered_back(graphs_are_done=False)

    def name_of(self, index: int) -> str:
        """Return the job's name of a buffer, as ``touched`` numbers them."""
        if index >= len(self._places):
            return "one of the module buffers"
        return f"{self._places[index].job_name}{self._places[index].full_name}"

    def _hashes(self, changed: Sequence[int], buffers: Sequence[torch.Tensor]) -> tuple[tuple[int, bytes], ...] | None:
        if not self._agreed:
            return None
        small = [index for index in changed if _nbytes(buffers[index]) <= _HASHED_BYTES]
        found = tuple((index, _hash([buffers[index]])) for index in small[:_MOST_HASHED])
        rest = small[_MOST_HASHED:]
        return found if not rest else (*found, (len(self._places), _hash([buffers[index] for index in rest])))

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step with the current buffers, including changes by code between the steps."""
        self._fill()
        buffers = []
        for place in self._places:
            buffer = place.get()
            if buffer is None:
                raise ConfigError(f"the buffer {place.full_name} is gone: buffers stay registered while a job trains")
            buffers.append(buffer)
        changed = self._changed()
        for index in changed:
            self._committed[index] = _copy(buffers[index])
        if any(new is not old for new, old in zip(buffers, self._tensors, strict=True)):
            self._aliased = None
        self.touched = self._hashes(changed, buffers)
        self._tensors, self._versions = buffers, [each._version for each in buffers]

    def _fill(self) -> None:
        """Include buffers that code between the steps filled."""
        for place in [each for each in self._empty if each.get() is not None]:
            buffer = place.get()
            assert buffer is not None
            self._empty.remove(place)
            self._places.append(place)
            self._tensors.append(buffer)
            self._committed.append(_copy(buffer))
            self._versions.append(buffer._version)


class _Place:
    """A module and name under which a buffer is registered."""

    def __init__(self, module: torch.nn.Module, name: str, full_name: str, job_name: str) -> None:
        self._module = module
        self._name = name
        self.full_name = full_name
        self.job_name = job_name

    def get(self) -> torch.Tensor | None:
        return self._module._buffers.get(self._name)

    def put(self, tensor: torch.Tensor) -> None:
        self._module._buffers[self._name] = tensor


def _aliased(modules: Sequence[torch.nn.Module]) -> frozenset[int]:
    """Return storages that modules reach by several names: as two buffers, or a buffer and an attribute."""
    seen: set[int] = set()
    twice: set[int] = set()
    parts = {id(part): part for module in modules for part in module.modules()}
    for part in parts.values():
        for value in (*part._buffers.values(), *vars(part).values()):
            if isinstance(value, torch.Tensor):
                (twice if _storage(value) in seen else seen).add(_storage(value))
    return frozenset(twice)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _became(place: _Place, was: torch.Tensor | None, now: torch.Tensor | None) -> str:
    return (
        f"the buffer {place.full_name} was {_kind(was)} and became {_kind(now)} in the forward pass:"
        " a buffer keeps its shape and type; what grows or comes and goes belongs into a plain attribute"
    )


def _kind(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, so that bytes can be written into it."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _hash(tensors: Sequence[torch.Tensor]) -> bytes:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(memoryview(_as_bytes(tensor).cpu().numpy()))  # type: ignore[arg-type]
    return bytes(hasher.digest(length=8))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor; a contiguous one shares its memory."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
