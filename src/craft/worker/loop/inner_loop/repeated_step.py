"""Run the body of one ``job.attempts`` step twice and compare the resulting states.

A body that is undone runs again and must do the same: everything it depends on must be in the restored state. This checks it
once, before a loss makes it matter: ``Attempts`` undoes the first attempt at one step on purpose. Input: the state after the
first attempt and after the next. Output: nothing, or ``BitsDiffer``. Runs on the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from craft.protocol.errors import BitsDiffer
from craft.snapshots.state.leaves import Leaf, digests

REHEARSED = 3
"""Number of the step whose body runs twice: optimizers have their state by then."""


class RepeatedStep:
    """The repeated step of one loop, on one worker."""

    def __init__(self, leaves: Callable[[], list[Leaf]], enabled: bool) -> None:
        """``leaves`` returns the current training state."""
        self._leaves = leaves
        self._enabled = enabled
        self._found: dict[str, str] | None = None

    def is_due(self, step: int, number: int, idle: Collection[str]) -> bool:
        """Return whether to undo this attempt; all workers agree.

        Not after a loss: some workers may have finished the first attempt and others not. Not while a worker follows that needs
        each reduction of the step.
        """
        return self._enabled and step == REHEARSED and number == 0 and not idle

    def keep(self) -> None:
        """Keep the digests of the state after the first attempt."""
        self._found = dict(digests(self._leaves()))

    def check(self, step: int) -> None:
        """Raise BitsDiffer if this later attempt leaves another state than the first."""
        if self._found is None or step != REHEARSED:
            return
        before, self._found = self._found, None
        differing = [name for name, found in digests(self._leaves()) if before.get(name) != found]
        if differing:
            others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise BitsDiffer(
                f"the body of step {step} ran twice from the same state, to try it out, and left another {differing[0]}{others}"
                " the second time: it depends on something that is not put back when a step is taken back (a counter, a"
                " torch.Generator of the script, a hidden state). Register it (job.register_state), or derive it from"
                " attempt.step. A kernel that is not deterministic shows in the same way; --no-check-bits leaves this out"
            )
