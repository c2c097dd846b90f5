"""Microbatches of streams: ``stream(microbatch, num_microbatches, start_step)`` returns an iterator over its items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from craft.worker.data import rng
from craft.worker.data.sources import ENDED, Source

Stream = Callable[[int, int, int], Iterator[Any]]


class StreamSource(Source):
    """One iterator for each microbatch, opened by the worker that computes it."""

    def __init__(self, stream: Stream, *, microbatches: int, seed: int, total_steps: int | None) -> None:
        super().__init__(microbatches, total_steps)
        self._stream = stream
        self._seed = seed
        self._open: dict[int, tuple[int, Iterator[Any]]] = {}
        """(step of the next item, iterator) by microbatch."""
        self._ahead: dict[tuple[int, int], Any] = {}

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        self._ahead = {key: data for key, data in self._ahead.items() if key[0] >= step}

    def fetch(self, step: int, microbatch: int) -> Any:
        # Not kept: the script may change it. If it is needed again, it is read again.
        key = (step, microbatch)
        return self._ahead.pop(key) if key in self._ahead else self._draw(step, microbatch)

    def more(self, step: int, microbatch: int) -> bool:
        # Read nothing past the last step: the read might block, and its result would be thrown away.
        if self.size_of(step) == 0:
            return False
        self._ahead[step, microbatch] = self.fetch(step, microbatch)
        return self._ahead[step, microbatch] is not ENDED

    def _draw(self, step: int, microbatch: int) -> Any:
        position, iterator = self._open.get(microbatch, (-1, iter(())))
        if position != step:
            iterator = self._open_at(step, microbatch)
        self._open[microbatch] = (step + 1, iterator)
        return self._next_item(iterator, step, microbatch)

    def again(self, step: int, microbatch: int) -> Any:
        return self._next_item(self._open_at(step, microbatch), step, microbatch)

    def _open_at(self, step: int, microbatch: int) -> Iterator[Any]:
        rng.seed_all(rng.derive(self._seed, rng.DATA, step, microbatch))
        return iter(self._stream(microbatch, self._microbatches, step))

    def _next_item(self, iterator: Iterator[Any], step: int, microbatch: int) -> Any:
        # Seeded again: the item must not depend on whether the stream was opened just now.
        rng.seed_all(rng.derive(self._seed, rng.DATA, step, microbatch))
        return next(iterator, ENDED)

    def close(self) -> None:
        self._open = {}
