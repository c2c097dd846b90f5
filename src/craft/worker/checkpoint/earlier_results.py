"""The results of an earlier run of this job: steps that are computed a second time must give the same.

``CheckpointLifecycle`` calls it on the main thread, after a checkpoint was loaded and at step boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from craft.decide.techniques import Divergence, Loss
from craft.decide.techniques.technique import Chosen
from craft.settings.rundir import RunDir
from craft.snapshots.state.leaves import Leaf
from craft.worker.checkpoint.recomputed_steps import RecomputedSteps
from craft.worker.checkpoint.resumed_steps import ResumedSteps
from craft.worker.state.loop_context import LoopContext


class EarlierResults:
    """What is known of the steps since a checkpoint: their metrics, and digests of the state after them."""

    def __init__(self, context: LoopContext, leaves: Callable[[], list[Leaf]]) -> None:
        """``leaves`` returns the current training state."""
        self._membership = context.membership
        self._run_dir = context.settings.run_dir
        self._comparable = context.settings.check_bits and not _leaves_out(context.techniques)
        self._recomputed: RecomputedSteps | None = None
        self._resumed: ResumedSteps | None = None
        if context.target is not None and self._comparable:
            self._resumed = ResumedSteps(context.target.tiers.durable, leaves)

    def restored(self, branch: int, step: int) -> None:
        """Expect the results of the steps after a checkpoint that the job begins from."""
        if self._membership.restoration is not None and self._run_dir is not None and self._comparable:
            # The job restarted by itself.
            self._recomputed = RecomputedSteps.read(RunDir(self._run_dir).metrics, step)
        if self._resumed is not None:
            self._resumed.restored(branch, step)

    def rolled_back(self) -> None:
        """Expect nothing: other data follows."""
        self._recomputed = None

    def saved(self, branch: int, step: int) -> None:
        """Keep the results of the steps after a checkpoint that was taken now."""
        if self._resumed is not None:
            self._resumed.saved(branch, step)

    def check_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise BitsDiffer if ``step`` gave other metrics before the job restarted."""
        if self._recomputed is not None:
            self._recomputed.check(step, metrics)

    def check_state(self, step: int, leads: bool) -> str | None:
        """Return a message if the state after ``step`` steps was different before, else None."""
        return self._resumed.at_boundary(step, leads) if self._resumed is not None else None

    @property
    def same_script(self) -> bool:
        """Whether this is the script that computed the steps before."""
        return self._resumed is not None and self._resumed.same_script

    def close(self) -> None:
        if self._resumed is not None:
            self._resumed.close()


def _leaves_out(techniques: Chosen) -> bool:
    """Return whether a step may be recomputed with other samples than the first time."""
    loss, divergence = techniques.get(Loss), techniques.get(Divergence)
    shrinks = loss is not None and loss.settings.answer == "shrink"
    return shrinks or (divergence is not None and divergence.settings.answer == "rollback")
