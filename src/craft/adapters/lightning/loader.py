"""What Lightning's fit loop iterates over in place of the script's own training data: one item per optimizer step."""

from __future__ import annotations

from typing import Any

from craft.worker import loader as steps


class StepLoader(steps.StepLoader):
    """Gives ``Step`` after ``Step``; the batches of one come out of it in ``CraftStrategy.optimizer_step``."""

    def __init__(self, loader: Any, microbatches: int) -> None:
        super().__init__(loader, microbatches, 'Trainer(strategy="craft")')

    # Lightning asks for these where it resumes in the middle of an epoch: this loader goes on where the job is.

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
