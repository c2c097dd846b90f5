"""``StepLoader``: replaces a framework's training loader, with one item per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from craft.protocol.errors import ConfigError
from craft.worker.api.steps import Driven, Step
from craft.worker.data.loader_settings import samples_in_pass


class StepLoader:
    """Yields one ``Step`` after another; the framework's loop takes the microbatches out of each.

    A framework detects an epoch's end by the length, so one iterator serves all epochs, also one that began in another process.
    """

    def __init__(self, loader: Any, microbatches: int, asked_by: str) -> None:
        """``loader`` is the script's: each of its batches is a microbatch here. ``asked_by`` names this for the script."""
        if not isinstance(loader, DataLoader):
            raise ConfigError(f"{asked_by} needs a torch DataLoader for training, not a {type(loader).__qualname__}")
        batches = loader.batch_sampler
        if batches is None or getattr(batches, "batch_size", None) is None:
            raise ConfigError(
                f"{asked_by} needs a DataLoader with a batch_size: its batches are the microbatches of a step"
            )
        self.loader = loader
        self.dataset = loader.dataset
        self.microbatches = microbatches
        self.global_batch = int(batches.batch_size) * microbatches  # type: ignore[attr-defined]
        self._drop_last = bool(getattr(batches, "drop_last", False))
        self.driven: Driven | None = None
        self.on_end: Callable[[], None] = _nothing
        """Called when the framework asks for a step and the job has none, because the job was asked to stop."""

    def __len__(self) -> int:
        """Return the steps in an epoch."""
        samples = samples_in_pass(self.loader)
        return samples // self.global_batch if self._drop_last else -(-samples // self.global_batch)

    def samples(self, position: int) -> int:
        """Return the samples in the step at this position of an epoch."""
        return min(self.global_batch, samples_in_pass(self.loader) - position * self.global_batch)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        step = self.driven.next() if self.driven is not None else None
        if step is None:
            self.on_end()
            raise StopIteration
        return self.item(step)

    def item(self, step: Step) -> Any:
        """Return the framework's item for a step."""
        return step


def _nothing() -> None:
    """Do nothing: the default of ``on_end``."""
