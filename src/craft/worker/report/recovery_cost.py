"""Measure what a loss costs a worker: from the settlement after it to the next commit.

Every member measures; the first one that was there before the loss reports it for the journal. If that one is lost, too, the
next one reports again what may not have arrived: the lighthouse counts each loss once.
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
        """``samples(step, microbatch)``: the samples of a microbatch, None if unknown."""
        self._worker_id = worker_id
        self._note = note
        self._samples = samples
        self._since = 0
        """The generation of the last commit."""
        self._undisturbed: deque[float] = deque(maxlen=_REMEMBERED)
        """Seconds from commit to commit of the last steps without a loss."""
        self._open: Setback | None = None
        self._last: tuple[str, Recovered] | None = None
        """The worker that reports the last loss, and what this worker measured of it."""

    def settled(self, entered: Entered) -> None:
        """Begin to measure, unless the settled generation was announced."""
        if not entered.agreed:
            self._open = set_back(self._open, self._since, entered)

    def committed(self, step: int, generation: int, elapsed_s: float, now: float) -> None:
        """Record that ``step`` was committed ``elapsed_s`` after the one before."""
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
                # That worker may have died before its report arrived.
                self._note(self._last[1])
            self._note(found)
        self._last = (setback.teller, found)
