"""The loader that replaces the script's training data in the Trainer's loop: one item per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import IterableDataset

from craft.worker.api import step_loader as steps
from craft.worker.api.steps import Step


class StepInputs(dict[str, Any]):
    """Stands for a batch. Empty: the step's microbatches hold what the Trainer looks for in a batch."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step


class TrainerStepLoader(steps.StepLoader):
    """Yields ``StepInputs``; ``CraftMixin`` takes the microbatches of a step from it.

    Over a dataset with a length, the Trainer counts the steps of an epoch. Over an ``IterableDataset`` an epoch is one pass.
    """

    def __init__(self, loader: Any, microbatches: int) -> None:
        super().__init__(loader, microbatches, "CraftTrainer")
        self.is_iterable = isinstance(self.dataset, IterableDataset)
        self.epoch = 0
        """The Trainer's counter; used for an ``IterableDataset`` only."""
        self._pass_is_over = False

    @property
    def has_length(self) -> bool:
        return hasattr(self.dataset, "__len__")

    @property
    def shuffle(self) -> bool | None:
        """True for accelerate's sampler, whose seed depends on earlier draws; None: by the existing sampler."""
        sampler = getattr(self.loader.batch_sampler, "sampler", None)
        return True if isinstance(sampler, SeedableRandomSampler) and not sampler.replacement else None

    def samples(self, position: int) -> int:
        return super().samples(position) if self.has_length and not self.is_iterable else self.global_batch

    def __iter__(self) -> Iterator[Any]:
        if self._pass_is_over:
            self.epoch += 1
            self._pass_is_over = False
        return self

    def __next__(self) -> Any:
        if self.is_iterable and self.driven is not None:
            epoch = self.driven.epoch
            # The Trainer asks again until it has made the steps of an epoch.
            self._pass_is_over = epoch is not None and epoch > self.epoch
            if self._pass_is_over:
                raise StopIteration
        return super().__next__()

    def item(self, step: Step) -> StepInputs:
        return StepInputs(step)
