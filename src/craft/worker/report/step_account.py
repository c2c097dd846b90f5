"""A worker's account of its steps: what is written down of each, how long they take, and what losses cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from craft.protocol.events import Recovered
from craft.protocol.generation_log import Entered
from craft.worker.report.recovery_cost import RecoveryCosts
from craft.worker.report.step_log import Committed, StepLog

_SMOOTHING = 0.1


class StepAccount:
    """Owned by the main thread, but for ``entered``, which whoever follows generations calls."""

    def __init__(
        self,
        run_dir: Path | None,
        worker_id: str,
        note: Callable[[Recovered], None],
        samples: Callable[[int, int], int | None],
        unwritten: Callable[[str], None],
    ) -> None:
        """``samples(step, microbatch)``: how many there are in it, if that is known; ``unwritten``: see ``StepLog``."""
        self.step_s = 0.0
        """From commit to commit, smoothed."""
        self._step_log = StepLog(run_dir, worker_id, unwritten)
        self._recovery_costs = RecoveryCosts(worker_id, note, samples)
        self._last_commit: float | None = None

    def begin(self) -> None:
        """The first step begins now."""
        self._last_commit = time.monotonic()

    def entered(self, entered: Entered) -> None:
        """This worker is in a generation."""
        self._step_log.entered(entered)

    def settled(self, entered: Entered) -> None:
        """All who are in that generation have agreed on how to go on."""
        self._recovery_costs.settled(entered)

    def committed(self, committed: Committed) -> None:
        """A step was committed just now."""
        self._step_log.committed(committed)
        # Not by the clock, which may be set meanwhile.
        now = time.monotonic()
        if self._last_commit is not None:
            elapsed = now - self._last_commit
            self._recovery_costs.committed(committed.step, committed.generation, elapsed, time.time())
            self.step_s = elapsed if not self.step_s else self.step_s + _SMOOTHING * (elapsed - self.step_s)
        self._last_commit = now

    def complete(self) -> None:
        """There are no more steps."""
        self._step_log.complete()
