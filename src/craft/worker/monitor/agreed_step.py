"""Up to which step the whole state is known to have been the same on all workers.

Each step compares one slice of the state (``worker/monitor/consistency.py``), and all slices have their turn within a
period. A difference does not go away by itself: after as many comparisons in a row as there are slices, the state before
the first of them was the same as a whole. After a checkpoint was taken, all of it is compared at once. Enters: every
committed step. Leaves: the step, for the words of this worker, so that a joiner knows it too, and for the checkpoints that
are doubted when bits differ. Belongs to the main thread.
"""

from __future__ import annotations


class AgreedStep:
    """Counts comparisons in a row."""

    def __init__(self) -> None:
        self.step = 0
        """Committed steps of the last state that is known to have been the same."""
        self._in_a_row = 0

    def begin(self, step: int) -> None:
        """All have the state of ``step``: every byte of a checkpoint was verified, or the job begins there."""
        self.step, self._in_a_row = step, 0

    def interrupt(self) -> None:
        """From now on other slices are compared."""
        self._in_a_row = 0

    def compared(self, step: int, period: int) -> None:
        """A slice of the state after ``step`` steps was the same on all, one of ``period``."""
        self._in_a_row += 1
        if self._in_a_row >= period:
            # One less: what is not in any slice (counters, rates) shows in the slices one step later.
            self.hear(step - period)

    def hear(self, step: int) -> None:
        """The whole state of ``step`` was the same: it was compared at once, or another member knows it."""
        self.step = max(self.step, step)
