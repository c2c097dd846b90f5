"""Compute one microbatch twice, once in a job's life: its bits must not depend on what was computed before it.

Some steps in, each worker first computes a microbatch of another worker (a worker alone: its first one), and then its own.
So every microbatch is computed once with one more before it than the other time. It comes first since nothing is held yet:
it takes no more memory than any microbatch. Both digests travel in the words of that step. If the step is disturbed, a later
one is tried.
"""

from __future__ import annotations

from craft.decide.step.ledger import Ledger
from craft.decide.step.plan import share_of
from craft.protocol.control_word import Combined

PROBE = -1
"""In place of a microbatch: microbatch 0 is computed once more, only to compare its bits."""
_AFTER_STEPS = 3
"""Late enough that what is carried along differs from what it was at first."""
_MOST_TRIES = 5


def is_extra(microbatch: int) -> bool:
    """Whether this stands for a microbatch that is computed for comparison only."""
    return microbatch < 0


def is_repeat(microbatch: int) -> bool:
    """Whether this stands for one that is computed a second time in the same step."""
    return microbatch < PROBE


def place_of(microbatch: int) -> int:
    """The microbatch whose data it has."""
    if is_repeat(microbatch):
        return -microbatch - 2
    return 0 if microbatch == PROBE else microbatch


def repeat_of(microbatch: int) -> int:
    """What stands for ``microbatch``, computed a second time."""
    return -microbatch - 2


class RepeatedMicrobatch:
    """Of one worker and loop. Belongs to the main thread."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._first: int | None = None
        self._tries = 0
        self.active = False
        """Whether it is done in the step in flight."""
        self.computed: dict[int, bytes] = {}
        self.repeated: dict[int, bytes] = {}

    def give_up(self) -> None:
        """This worker joined later: the others have done it, or do it without this one."""
        self._wanted = self.active = False

    def begin(self, step: int) -> None:
        """Step ``step`` begins."""
        if self._first is None:
            self._first = step
        self.computed, self.repeated = {}, {}
        self.active = self._wanted and step >= self._first + _AFTER_STEPS and self._tries < _MOST_TRIES
        self._tries += self.active

    def disturbed(self) -> None:
        """Members changed, or the data has ended: not in this step."""
        self.active = False
        self.computed, self.repeated = {}, {}

    def due(self, ledger: Ledger) -> int | None:
        """What to compute now for comparison, if anything."""
        if not self.active or self.repeated or ledger.held or ledger.worker_id in ledger.idle:
            return None
        target = self._target(ledger)
        return None if target is None else repeat_of(target)

    def _target(self, ledger: Ledger) -> int | None:
        """The first microbatch of the next worker that has one; in every second try, or alone, one of this worker's."""
        size = len(ledger.members)
        if self._tries % 2 == 1:
            for rank in ((ledger.rank + offset) % size for offset in range(1, size)):
                if share := share_of(ledger.owners, rank):
                    return share[0]
        return min(ledger.share, default=None)

    def found(self, microbatch: int, digest: bytes) -> None:
        """The digest of a gradient is known."""
        if self.active:
            (self.repeated if is_repeat(microbatch) else self.computed)[place_of(microbatch)] = digest

    def differing(self) -> int | None:
        """A microbatch that this worker computed twice, with different bits."""
        twice = self.repeated.keys() & self.computed.keys()
        return next((each for each in sorted(twice) if self.repeated[each] != self.computed[each]), None)

    def committed(self, combined: Combined | None) -> None:
        """The step is committed: if something was compared in it, it was equal, and that is enough."""
        if combined is not None and combined.repeated:
            self._wanted = False
        self.active = False
