"""Compare the bits of gradients and of the state between all members.

Digests travel in the control words; the combined word shows whether they differ.
"""

from __future__ import annotations

from collections.abc import Callable

from craft.decide.step.ledger import Ledger
from craft.protocol.control_word import Combined
from craft.snapshots.state.leaves import (
    Leaf,
    RotatingDigest,
    hash_parts,
    sample_digest,
    sampled,
    tensor_bytes,
    whole_digest,
)
from craft.worker.monitor.consistency_errors import check_bits, check_newcomer, check_sample, repeated_alone
from craft.worker.monitor.repeated_microbatch import PROBE, RepeatedMicrobatch, is_repeat
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.word_parts import ConsistencyPart

_SAMPLED = 1 << 14
"""Elements sampled of each bucket."""

Hasher = Callable[[Flats], bytes]


class AgreedStep:
    """The last step whose whole state is known to be the same on all workers. Belongs to the main thread.

    Each step compares one slice of the state, and every slice has its turn within a period. A difference stays: after as many
    equal comparisons in a row as there are slices, the whole state was equal before the first of them. The state of a
    checkpoint is compared as a whole. Workers share the step in their words; it decides which checkpoints are suspect when
    bits differ.
    """

    def __init__(self) -> None:
        self.step = 0
        """Committed steps of the last state that is known to be equal."""
        self._in_a_row = 0

    def begin(self, step: int) -> None:
        """Begin at ``step``, where all are equal: a checkpoint was verified, or the job begins there."""
        self.step, self._in_a_row = step, 0

    def interrupt(self) -> None:
        """Restart the count: other slices are compared from now on."""
        self._in_a_row = 0

    def compared(self, step: int, period: int) -> None:
        """Count an equal slice, one of ``period``, of the state after ``step`` steps."""
        self._in_a_row += 1
        if self._in_a_row >= period:
            # One less: what is in no slice (counters, rates) shows in the slices one step later.
            self.raise_to(step - period)

    def raise_to(self, step: int) -> None:
        """Take over that the whole state of ``step`` is equal: it was compared at once, or another member knows it."""
        self.step = max(self.step, step)


class ConsistencyCheck:
    """The comparisons of this worker in the step in flight. Belongs to the main thread."""

    def __init__(
        self,
        compares: bool,
        slice_bytes: int,
        leaves: Callable[[], list[Leaf]],
        warn: Callable[[str], None] = lambda _: None,
        is_lenient: Callable[[], bool] = lambda: False,
    ) -> None:
        """``compares``: whether gradients are compared; each step compares ``slice_bytes`` of the state.

        ``is_lenient``: only warn of a microbatch that gives other bits when this worker repeats it.
        """
        self._warn = warn
        self._is_lenient = is_lenient
        self.probe_wanted = compares
        """Whether microbatch 0 of this step is compared."""
        self._probes = compares
        """Whether this worker computes it for that."""
        self.repeats = RepeatedMicrobatch(compares)
        self.newcomer = False
        """Whether this worker joined, and has not yet committed a step in which it computed."""
        self._compares = compares
        self._leaves = leaves
        self._rotating = RotatingDigest(slice_bytes)
        self.agreement = AgreedStep()
        self._state: Callable[[], bytes] = bytes
        self._sampled = b""
        """Digest of a sample of the whole state, when a newcomer computes for the first time."""
        self._whole: Callable[[], bytes] = bytes
        """Digest of the whole state, after a checkpoint was taken."""
        self._probe = b""
        self._sample = b""
        """Digest of microbatch 0 (its gradient, or the rows that it gathers) if it was computed here: workers that catch up
        compare it.
        """

    def restart(self, step: int) -> None:
        """Align the slices: from ``step`` on all workers compare the same ones, whenever each of them joined."""
        self._rotating.restart(step)
        self.agreement.interrupt()

    def joins(self) -> None:
        """Skip the comparisons of the first steps: this worker joins a running job."""
        self.probe_wanted = False
        self.repeats.give_up()

    def begin_step(self, step: int) -> None:
        """Take the digest while the state is that of the last commit: forward changes buffers."""
        if self._rotating.due(step):
            self._refresh()
        self._state = self._rotating.take(step)
        self._sample = self._sampled = b""
        self._whole = bytes
        self.repeats.begin(step)

    def _refresh(self) -> None:
        if self._rotating.refresh(self._leaves()):
            self.agreement.interrupt()

    def sample_state(self, gradients: bool = False, probes: bool = True) -> None:
        """Compare a sample of the whole state: a worker computes for the first time in this step.

        ``gradients``: compare the gradient of microbatch 0, too; ``probes``: this worker computes it for that.
        """
        if gradients and self._compares:
            self._probes = probes or (self.probe_wanted and self._probes)
            self.probe_wanted = True
        if self._rotating.is_on and not self._sampled:
            self._sampled = sample_digest(self._leaves())

    def hash_whole_state(self) -> None:
        """Compare the whole state: a checkpoint was taken as this step begins."""
        if self._rotating.is_on:
            self._whole = whole_digest(self._leaves())

    def probe_due(self, ledger: Ledger) -> bool:
        """Whether this worker computes microbatch 0 of the step only to compare it."""
        alone = len(ledger.layout.complete(len(ledger.members))) == 1
        # The owner of microbatch 0 computes it anyway; a retry needs no comparison.
        cannot = alone or (bool(ledger.layout.slots) and not ledger.is_live)
        return self.probe_wanted and self._probes and not (self._probe or ledger.held or cannot or 0 in ledger.share)

    def wants(self, extra: int) -> bool:
        """Whether a microbatch that is computed only for comparison is still needed."""
        return self.probe_wanted if extra == PROBE else self.repeats.active

    def leave_out(self, extra: int) -> None:
        """Drop such a microbatch: it cannot be computed in this step."""
        if extra == PROBE:
            self.probe_wanted = False
        else:
            self.repeats.disturbed()

    def hasher(self, microbatch: int, ledger: Ledger) -> Hasher | None:
        """Return how to hash the gradient of ``microbatch``; None: not at all. A joiner that warms up computes PROBE."""
        if self.probe_wanted and microbatch in (0, PROBE):
            return hash_of
        if self.repeats.active or is_repeat(microbatch):
            return sample_of
        if microbatch not in (0, PROBE):
            return None
        return sample_of if self._compares and (microbatch == PROBE or ledger.idle) else None

    def found(self, microbatch: int, hasher: Hasher | None, digest: bytes) -> None:
        """Take the digest that ``hasher`` gave."""
        if hasher is hash_of:
            self._probe = digest
        elif hasher is sample_of:
            self.repeats.found(microbatch, digest)
            if microbatch in (0, PROBE):
                self._sample = digest

    def found_rows(self, digest: bytes) -> None:
        """Take the digest of the rows that microbatch 0 gathers: a worker that catches up cannot compute its gradient."""
        if self._compares:
            self._sample = digest

    def word_part(self) -> ConsistencyPart:
        """Return the hashes that this worker puts into its control word."""
        if self.repeats.repeated and self._is_lenient():
            self._warn_of_repeated()
        return ConsistencyPart(
            digest=self._state(),
            probe=self._probe,
            sample=self._sample,
            state=self._sampled,
            whole=self._whole(),
            newcomer=self.newcomer,
            agreed=self.agreement.step,
            computed=tuple(self.repeats.computed.items()),
            repeated=tuple(self.repeats.repeated.items()),
        )

    def _warn_of_repeated(self) -> None:
        differing = self.repeats.differing()
        if differing is not None:
            self._warn(repeated_alone(differing))
        self.repeats.give_up()
        self.repeats.disturbed()

    def check(self, combined: Combined, ledger: Ledger, buffer_name: Callable[[int], str]) -> bool:
        """Return whether the step counts; False: newcomers leave, and the others redo it.

        Raises BitsDiffer if all must end, NewcomerDiffers if only this worker must.
        """
        if not combined.differs:
            return True
        if combined.outcasts:
            check_newcomer(combined, ledger.rank, ledger.members)
            return False
        check_bits(combined, ledger.members, self._rotating.names, buffer_name)
        return True

    def check_replayed(self, combined: Combined) -> None:
        """Raise NewcomerDiffers if this worker, catching up, got other bits in microbatch 0 than those that committed it."""
        own, self._sample = self._sample, b""
        check_sample(own, combined.sample, combined.step)

    def regrouped(self) -> None:
        """Drop the digests of the state: the step is retried under another membership."""
        self._state = self._whole = bytes
        self.repeats.disturbed()

    def committed(self, combined: Combined | None = None, computed: bool = True) -> None:
        """Record that the step is committed: all digests were equal. ``computed``: whether this worker computed in it."""
        self.probe_wanted = False
        self._probe = self._sample = self._sampled = b""
        self._whole = bytes
        self._agreed(combined)
        self.repeats.committed(combined)
        if computed:
            self.newcomer = False

    def _agreed(self, combined: Combined | None) -> None:
        if combined is None:
            return
        if not combined.compared:
            self.agreement.interrupt()
        elif self._rotating.is_whole(combined.step):
            self.agreement.compared(combined.step, self._rotating.period)
        if combined.compared_whole:
            self.agreement.raise_to(combined.step)
        self.agreement.raise_to(combined.agreed)


def hash_of(flats: Flats) -> bytes:
    """Return a digest of a gradient."""
    return hash_parts(map(tensor_bytes, flats.tensors))


def sample_of(flats: Flats) -> bytes:
    """Return a digest of elements spread over each bucket of a gradient; its cost does not show in a step."""
    return hash_parts(sampled(tensor, _SAMPLED) for tensor in flats.tensors)
