"""Run one step of a loop of the script's own twice, and compare the states that come of it.

A body that is taken back runs again. It must then do the same: what it depends on is in the state that was put back. This is
found out once, before a loss makes it matter: the first attempt at one step is taken back on purpose. ``Attempts`` calls it, on
the main thread. Enters: the state after the first attempt and after the next one. Leaves: nothing, or ``BitsDiffer``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from craft.protocol.errors import BitsDiffer
from craft.snapshots.state.leaves import Leaf, digests

REHEARSED = 3
"""The number of the step whose body runs twice: optimizers have their state by then."""


class RepeatedStep:
    """Of one loop, on one worker."""

    def __init__(self, leaves: Callable[[], list[Leaf]], enabled: bool) -> None:
        """``leaves`` gives the training state as it is now."""
        self._leaves = leaves
        self._enabled = enabled
        self._found: dict[str, str] | None = None

    def is_due(self, step: int, number: int, idle: Collection[str]) -> bool:
        """Whether this attempt is to be taken back; the same on all workers.

        After a loss it is not: some may be done with the first attempt, and others not. Nor while a worker follows that
        counts on each reduction of the step.
        """
        return self._enabled and step == REHEARSED and number == 0 and not idle

    def keep(self) -> None:
        """The first attempt has come to its end."""
        self._found = dict(digests(self._leaves()))

    def check(self, step: int) -> None:
        """Raise BitsDiffer if this attempt, a later one, leaves another state than the first."""
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
