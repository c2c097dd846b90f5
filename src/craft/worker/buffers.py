"""Module buffers: batch norm's statistics and the like.

Every microbatch starts from the buffers of the last commit; after the step they are what microbatch 0 made of them. So
they depend neither on who computed what nor on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_COMPARE_BYTES = 1 << 20
"""Larger buffers are taken as changed only if torch counted a change; smaller ones are compared (batch norm is not counted)."""


class Buffers:
    """The buffers of the replicated modules, as of the last commit, and as microbatch 0 left them."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        places: dict[int, tuple[torch.nn.Module, str]] = {}
        for root in modules:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        places.setdefault(id(buffer), (module, name))
        self._places = list(places.values())
        self._committed = [self._get(place).detach().clone() for place in self._places]
        self._versions = [self._get(place)._version for place in self._places]
        self._first: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._places)

    @staticmethod
    def _get(place: tuple[torch.nn.Module, str]) -> torch.Tensor:
        buffer = place[0]._buffers[place[1]]
        assert buffer is not None
        return buffer

    def _changed(self, index: int) -> bool:
        buffer, committed = self._get(self._places[index]), self._committed[index]
        if buffer.shape != committed.shape:
            return True
        if buffer.numel() * buffer.element_size() > _COMPARE_BYTES:
            return buffer._version != self._versions[index]
        # As bits: a NaN is equal to itself, and -0.0 is not 0.0.
        return not torch.equal(_bits(buffer), _bits(committed))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back to the last commit; before every microbatch."""
        for index in range(len(self._places)):
            if self._changed(index):
                self._put(index, self._committed[index])

    @torch.no_grad()
    def keep_first(self) -> None:
        """Microbatch 0 was computed here: keep what it made of the buffers."""
        self._first = {
            index: self._get(self._places[index]).detach().clone()
            for index in range(len(self._places))
            if self._changed(index)
        }

    @property
    def changed(self) -> tuple[int, ...]:
        """Buffers that microbatch 0 changed; () unless it was computed here."""
        return tuple(self._first)

    def pack(self) -> torch.Tensor:
        """What microbatch 0 changed, as raw bytes."""
        return torch.cat([_bits(value) for value in self._first.values()]) if self._first else torch.empty(0)

    def empty_like(self, changed: tuple[int, ...]) -> torch.Tensor:
        """Room for what ``pack`` of another worker gives for ``changed``."""
        return torch.empty(sum(_nbytes(self._committed[index]) for index in changed), dtype=torch.uint8)

    @torch.no_grad()
    def commit(self, changed: tuple[int, ...], packed: torch.Tensor | None) -> None:
        """The step is committed: the buffers are what microbatch 0 made of them, here and everywhere."""
        self._first = {}
        offset = 0
        for index in changed:
            assert packed is not None
            committed = self._committed[index]
            size = _nbytes(committed)
            _bits(committed).copy_(packed[offset : offset + size])
            offset += size
        self.restore()

    def reload(self) -> None:
        """Take the buffers as they are now for those of the last commit; after state was loaded."""
        for index, place in enumerate(self._places):
            self._committed[index] = self._get(place).detach().clone()
            self._versions[index] = self._get(place)._version

    def _put(self, index: int, value: torch.Tensor) -> None:
        buffer = self._get(self._places[index])
        if buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            module, name = self._places[index]
            module._buffers[name] = buffer = value.clone()
        self._versions[index] = buffer._version


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; shares its memory where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
