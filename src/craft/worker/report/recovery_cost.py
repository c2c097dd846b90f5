"""What losses cost, as a worker sees it: from the settlement after one to the next commit.

Called by the main thread. Every member keeps count; the first one that was there before tells it, for the journal. If
that one is lost, too, the next one tells what it may not have told: the lighthouse takes each in once.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from craft.decide.job.fault_cost import Setback, recovered, set_back
from craft.protocol.events import Recovered
from craft.protocol.generation_log import Entered

_REMEMBERED = 20


class RecoveryCosts:
    """Owned by the main thread."""

    def __init__(
        self, worker_id: str, note: Callable[[Recovered], None], samples: Callable[[int, int], int | None]
    ) -> None:
        """``samples(step, microbatch)``: how many there are in it, if that is known."""
        self._worker_id = worker_id
        self._note = note
        self._samples = samples
        self._since = 0
        """The generation of the last commit."""
        self._undisturbed: deque[float] = deque(maxlen=_REMEMBERED)
        """How long the last steps took from commit to commit."""
        self._open: Setback | None = None
        self._last: tuple[str, Recovered] | None = None
        """What this worker found when something was lost before, and who was to tell it."""

    def settled(self, entered: Entered) -> None:
        """A generation is settled; one that all had agreed on is no setback."""
        if not entered.agreed:
            self._open = set_back(self._open, self._since, entered)

    def committed(self, step: int, generation: int, elapsed_s: float, now: float) -> None:
        """``step`` was committed, ``elapsed_s`` after the one before."""
        setback, self._open, self._since = self._open, None, generation
        if setback is None:
            self._undisturbed.append(elapsed_s)
            return
        usual_s = statistics.median(self._undisturbed) if self._undisturbed else None
        found = recovered(
            setback,
            worker_id=self._worker_id,
            generation=generation,
            step=step,
            lost_s=None if usual_s is None else max(0.0, elapsed_s - usual_s),
            samples=self._samples,
            now=now,
        )
        if setback.teller == self._worker_id:
            if self._last is not None and self._last[0] in setback.lost:
                # It may have died before anybody heard.
                self._note(self._last[1])
            self._note(found)
        self._last = (setback.teller, found)
