"""Map the job's step numbers to those of a source of microbatches.

They differ if a loop is not the first one of its script, and after a rollback, when the job continues with new data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from craft.worker.data.sample_order import Position
from craft.worker.data.sources import Source


class SkippingSource:
    """Step s of the job takes the data of step s - ``first_step()`` + ``skipped`` of the source."""

    def __init__(
        self, source: Source, total_steps: int | None, by_passes: bool, first_step: Callable[[], int] = lambda: 0
    ) -> None:
        """``by_passes``: the loop ends with the data, not after a number of steps; ``first_step``: where it began."""
        self._source = source
        self._total_steps = total_steps
        self._by_passes = by_passes
        self._first_step = first_step
        self.skipped = 0

    @property
    def total_steps(self) -> int | None:
        """The job's steps at the end of the loop; None: until the data ends."""
        if self._total_steps is None:
            return None
        return self._total_steps + self._first_step() - (self.skipped if self._by_passes else 0)

    def _at(self, step: int) -> int:
        return step - self._first_step() + self.skipped

    def skip(self, skipped: int) -> None:
        """Leave out ``skipped`` steps' worth of data from now on."""
        if not self._by_passes:
            self._source.extend(skipped - self.skipped)
        self.skipped = skipped

    def size_of(self, step: int) -> int:
        return self._source.size_of(self._at(step))

    def weight(self, step: int, microbatch: int) -> float:
        return self._source.weight(self._at(step), microbatch)

    def samples(self, step: int, microbatch: int) -> int | None:
        return self._source.samples(self._at(step), microbatch)

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        self._source.expect(self._at(step), share)

    def fetch(self, step: int, microbatch: int) -> Any:
        return self._source.fetch(self._at(step), microbatch)

    def again(self, step: int, microbatch: int) -> Any:
        return self._source.again(self._at(step), microbatch)

    def more(self, step: int, microbatch: int) -> bool:
        return self._source.more(self._at(step), microbatch)

    def epoch_of(self, step: int) -> int:
        return self._source.epoch_of(self._at(step))

    def is_last_of_epoch(self, step: int) -> bool:
        """Whether the next step is in another pass over the data, or past the end."""
        if self.total_steps is not None and step + 1 >= self.total_steps and self._by_passes:
            return True
        return self.epoch_of(step + 1) != self.epoch_of(step)

    def ends_epoch(self, step: int) -> int | None:
        return self._source.ends_epoch(self._at(step))

    def position(self, step: int) -> Position | None:
        return self._source.position(self._at(step))

    def seek(self, position: Position) -> None:
        self._source.seek(position)

    def close(self) -> None:
        self._source.close()
