"""Compute one microbatch twice, once per job: its bits must not depend on what was computed before it.

After some steps, each worker first computes a microbatch of another worker (a worker alone: its first one), and then its own.
So the same microbatch is computed at two different positions. The repeat comes first, when no gradient is held yet: it takes
no extra memory. Both digests travel in the words of that step. If the step is disturbed, a later one is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from craft.decide.step.ledger import Ledger
from craft.decide.step.plan import share_of
from craft.protocol.control_word import Combined

PROBE = -1
"""Stands for microbatch 0, computed once more only to compare its bits."""
_AFTER_STEPS = 3
"""Late enough that carried state differs from its initial value."""
_MOST_TRIES = 5


def is_extra(microbatch: int) -> bool:
    """Whether this number stands for a microbatch that is computed only for comparison."""
    return microbatch < 0


def is_repeat(microbatch: int) -> bool:
    """Whether this number stands for a microbatch that is computed a second time in its step."""
    return microbatch < PROBE


def place_of(microbatch: int) -> int:
    """Return the microbatch whose data this number stands for."""
    if is_repeat(microbatch):
        return -microbatch - 2
    return 0 if microbatch == PROBE else microbatch


def repeat_of(microbatch: int) -> int:
    """Return the number that stands for ``microbatch``, computed a second time."""
    return -microbatch - 2


def probes_for(ledger: Ledger, able: Sequence[int], fresh: Collection[str]) -> bool:
    """Return whether this worker's replica computes microbatch 0 to compare it with that of ``fresh`` workers, or is theirs.

    The owner of microbatch 0 computes it anyway. If there are fresh workers in that replica, the next one does it as well.
    """
    if ledger.replica not in able:
        return False
    layout, members = ledger.layout, ledger.members
    with_fresh = [each for each in able if any(members[rank] in fresh for rank in layout.ranks_of(each))]
    owner = ledger.owners[0] if ledger.owners else able[0]
    if owner in with_fresh:
        with_fresh.append(able[(able.index(owner) + 1) % len(able)])
    return ledger.replica in with_fresh


class RepeatedMicrobatch:
    """The repeat of one worker in one loop. Belongs to the main thread."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._first: int | None = None
        self._tries = 0
        self.active = False
        """Whether the step in flight has a repeat."""
        self.computed: dict[int, bytes] = {}
        self.repeated: dict[int, bytes] = {}

    def give_up(self) -> None:
        """Never repeat: this worker joined late, and the others do it without it."""
        self._wanted = self.active = False

    def begin(self, step: int) -> None:
        """Begin ``step``: decide whether it has a repeat."""
        if self._first is None:
            self._first = step
        self.computed, self.repeated = {}, {}
        self.active = self._wanted and step >= self._first + _AFTER_STEPS and self._tries < _MOST_TRIES
        self._tries += self.active

    def disturbed(self) -> None:
        """Give up the repeat of this step: members changed, or the data has ended."""
        self.active = False
        self.computed, self.repeated = {}, {}

    def due(self, ledger: Ledger) -> int | None:
        """Return what to compute now for comparison; None: nothing."""
        if not self.active or self.repeated or ledger.held or not self._computes(ledger):
            return None
        target = self._target(ledger)
        return None if target is None else repeat_of(target)

    @staticmethod
    def _computes(ledger: Ledger) -> bool:
        """Return whether this worker can compute now: it is current, and so is its replica."""
        return ledger.is_live if ledger.layout.slots else ledger.worker_id not in ledger.idle

    def _target(self, ledger: Ledger) -> int | None:
        """Return the first microbatch of the next worker that has one; in every second try, or alone, of this worker."""
        replicas = ledger.layout.complete(len(ledger.members))
        if self._tries % 2 == 1 and ledger.replica in replicas:
            own = replicas.index(ledger.replica)
            for replica in (*replicas[own + 1 :], *replicas[:own]):
                if share := share_of(ledger.owners, replica):
                    return share[0]
        return min(ledger.share, default=None)

    def found(self, microbatch: int, digest: bytes) -> None:
        """Take the digest of a gradient."""
        if self.active:
            (self.repeated if is_repeat(microbatch) else self.computed)[place_of(microbatch)] = digest

    def differing(self) -> int | None:
        """Return a microbatch that this worker computed twice with different bits; None: there is no such one."""
        twice = self.repeated.keys() & self.computed.keys()
        return next((each for each in sorted(twice) if self.repeated[each] != self.computed[each]), None)

    def committed(self, combined: Combined | None) -> None:
        """End the step: if it compared a repeat, that was equal, and no other is needed."""
        if combined is not None and combined.repeated:
            self._wanted = False
        self.active = False
