"""A source of microbatches from which steps are left out: after a roll-back the job goes on with new data."""

from __future__ import annotations

from typing import Any

from craft.worker.data import Source


class Shifted:
    """Step s of the job takes the data of step s + ``skipped`` of the source."""

    def __init__(self, source: Source, total_steps: int | None, by_passes: bool) -> None:
        """``by_passes``: the job ends with the data, and not after a number of steps."""
        self._source = source
        self._total_steps = total_steps
        self._by_passes = by_passes
        self.skipped = 0

    @property
    def total_steps(self) -> int | None:
        """How many steps the job has; None: until the streams end."""
        if self._total_steps is None or not self._by_passes:
            return self._total_steps
        return self._total_steps - self.skipped

    def skip(self, skipped: int) -> None:
        """From now on leave ``skipped`` steps' worth of data out."""
        if not self._by_passes:
            self._source.extend(skipped - self.skipped)
        self.skipped = skipped

    def size_of(self, step: int) -> int:
        return self._source.size_of(step + self.skipped)

    def weight(self, step: int, microbatch: int) -> float:
        return self._source.weight(step + self.skipped, microbatch)

    def samples(self, step: int, microbatch: int) -> int | None:
        return self._source.samples(step + self.skipped, microbatch)

    def expect(self, step: int, share: tuple[int, ...]) -> None:
        self._source.expect(step + self.skipped, share)

    def fetch(self, step: int, microbatch: int) -> Any:
        return self._source.fetch(step + self.skipped, microbatch)

    def more(self, step: int, microbatch: int) -> bool:
        return self._source.more(step + self.skipped, microbatch)

    def epoch_of(self, step: int) -> int:
        return self._source.epoch_of(step + self.skipped)

    def close(self) -> None:
        self._source.close()
