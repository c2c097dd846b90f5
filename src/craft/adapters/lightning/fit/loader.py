"""The loader that replaces the script's ``DataLoader`` in Lightning's fit loop, if steps are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class RoundLoader:
    """Yields one item for each batch of Lightning's loop; all workers together compute ``per_round`` batches of data in it.

    Lightning detects an epoch's end by the length, so that one iterator serves all epochs, even one begun elsewhere.
    """

    def __init__(self, loader: DataLoader[Any], per_round: int, take: Callable[[], Any]) -> None:
        """``take`` returns the next item, or raises StopIteration."""
        self.loader = loader
        batches: Any = loader.batch_sampler
        self.batch = int(batches.batch_size)
        self._per_round = per_round
        self._take = take
        drawn = len(batches.sampler)
        self.samples = drawn - drawn % self.batch if batches.drop_last else drawn
        """In an epoch."""
        self.state_dict: Callable[[], dict[str, Any]]
        self.load_state_dict: Callable[[Any], None]

    def __len__(self) -> int:
        return -(-self.samples // (self.batch * self._per_round))

    def samples_of(self, first: int, rounds: int, limit: int) -> int:
        """Return the samples in so many rounds of an epoch from ``first`` on, of the first ``limit`` samples."""
        size = self.batch * self._per_round
        return max(0, min(rounds * size, min(limit, self.samples) - first * size))

    def __getattr__(self, name: str) -> Any:
        """Delegate to the script's loader; a state only where Lightning is to see it."""
        if name in ("loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.loader

    def __hash__(self) -> int:
        return id(self.loader)

    def __getstate__(self) -> dict[str, Any]:
        """Leave a copy without the fit."""
        return {name: value for name, value in vars(self).items() if name != "_take"}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._take()
