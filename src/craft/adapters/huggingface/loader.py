"""What the Trainer's loop iterates over in place of the script's own training data: one item per optimizer step."""

from __future__ import annotations

from typing import Any

from craft.worker import loader as steps
from craft.worker.steps import Step


class StepInputs(dict[str, Any]):
    """In the place of a batch. Empty: what the Trainer looks for in a batch is in the step's microbatches."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step


class StepLoader(steps.StepLoader):
    """Gives ``StepInputs``; the microbatches of a step come out of it in ``CraftMixin``."""

    def __init__(self, loader: Any, microbatches: int) -> None:
        super().__init__(loader, microbatches, "CraftTrainer")

    def item(self, step: Step) -> StepInputs:
        return StepInputs(step)
