"""Whether all members have the same bits: of microbatches' gradients, and of the state.

Enters: gradients and the state as the step in flight has them here. Leaves: digests for this worker's word, and a refusal
if the others' words say that theirs differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blake3 import blake3

from craft.decide.step.ledger import Ledger
from craft.protocol.control_word import Combined
from craft.snapshots.state.leaves import Leaf, RotatingDigest, sample_digest, tensor_bytes, whole_digest
from craft.worker.monitor.agreed_step import AgreedStep
from craft.worker.monitor.consistency_errors import check_bits, check_newcomer, check_sample, repeated_alone
from craft.worker.monitor.repeated_microbatch import PROBE, RepeatedMicrobatch, is_repeat
from craft.worker.reduce.accumulator import Flats

_SAMPLED = 1 << 14
"""Of each bucket."""

Hasher = Callable[[Flats], bytes]


class ConsistencyCheck:
    """Those of this worker, in the step in flight. Belongs to the main thread."""

    def __init__(
        self,
        compares: bool,
        slice_bytes: int,
        leaves: Callable[[], list[Leaf]],
        warn: Callable[[str], None] = lambda _: None,
        is_lenient: Callable[[], bool] = lambda: False,
    ) -> None:
        """``compares``: whether gradients are compared; of the state, ``slice_bytes`` are in each step.

        ``is_lenient``: a microbatch that gives other bits when it is repeated here is only warned of.
        """
        self._warn = warn
        self._is_lenient = is_lenient
        self.probe_wanted = compares
        """Whether every worker computes microbatch 0 of this step."""
        self.repeats = RepeatedMicrobatch(compares)
        self.newcomer = False
        """Whether this worker joined, and has not yet committed a step in which it computed."""
        self._compares = compares
        self._leaves = leaves
        self._rotating = RotatingDigest(slice_bytes)
        self.agreement = AgreedStep()
        self._state: Callable[[], bytes] = bytes
        self._sampled = b""
        """Of a sample of the whole state, where a newcomer computes for the first time."""
        self._whole: Callable[[], bytes] = bytes
        """Of the whole state, after a checkpoint was taken."""
        self._probe = b""
        self._sample = b""
        """Of microbatch 0, its gradient or the rows that it gathers, if it was computed here: what workers that catch up
        are told, or found while catching up.
        """

    def restart(self, step: int) -> None:
        """From ``step`` on all look at the same slices of the state, whenever each of them came."""
        self._rotating.restart(step)
        self.agreement.interrupt()

    def joins(self) -> None:
        """This worker joined a job that is on its way."""
        self.probe_wanted = False
        self.repeats.give_up()

    def look(self, step: int) -> None:
        """Look at the state while it is that of the last commit: forward changes buffers."""
        if self._rotating.due(step):
            self._refresh()
        self._state = self._rotating.take(step)
        self._sample = self._sampled = b""
        self._whole = bytes
        self.repeats.begin(step)

    def _refresh(self) -> None:
        if self._rotating.refresh(self._leaves()):
            self.agreement.interrupt()

    def look_at_all(self, gathers: bool = False) -> None:
        """A worker computes for the first time in this step: have the whole state compared, as far as a sample shows it.

        ``gathers``: and the gradient of microbatch 0, too.
        """
        self.probe_wanted = self.probe_wanted or (gathers and self._compares)
        if self._rotating.is_on and not self._sampled:
            self._sampled = sample_digest(self._leaves())

    def look_at_every_byte(self) -> None:
        """A checkpoint was taken as this step begins: have the whole state compared."""
        if self._rotating.is_on:
            self._whole = whole_digest(self._leaves())

    def probe_due(self, ledger: Ledger) -> bool:
        alone = len(ledger.members) == 1
        # The owner of microbatch 0 computes it anyway; a retry has no use for the comparison.
        return self.probe_wanted and not (self._probe or ledger.held or alone or 0 in ledger.share)

    def wants(self, extra: int) -> bool:
        """Whether a microbatch that is computed for comparison only is still wanted."""
        return self.probe_wanted if extra == PROBE else self.repeats.active

    def leave_out(self, extra: int) -> None:
        """It cannot be computed in this step."""
        if extra == PROBE:
            self.probe_wanted = False
        else:
            self.repeats.disturbed()

    def hasher(self, microbatch: int, ledger: Ledger) -> Hasher | None:
        """What is to be known of the gradient of ``microbatch``, if anything is. A joiner that warms up computes PROBE."""
        if self.probe_wanted and microbatch in (0, PROBE):
            return hash_of
        if self.repeats.active or is_repeat(microbatch):
            return sample_of
        if microbatch not in (0, PROBE):
            return None
        return sample_of if self._compares and (microbatch == PROBE or ledger.idle) else None

    def found(self, microbatch: int, hasher: Hasher | None, digest: bytes) -> None:
        """That is known now."""
        if hasher is hash_of:
            self._probe = digest
        elif hasher is sample_of:
            self.repeats.found(microbatch, digest)
            if microbatch in (0, PROBE):
                self._sample = digest

    def found_rows(self, digest: bytes) -> None:
        """Microbatch 0 gathers. A worker that catches up cannot compute its gradient, and compares the rows that it gives."""
        if self._compares:
            self._sample = digest

    def told(self) -> dict[str, Any]:
        """What this worker's word says of them."""
        if self.repeats.repeated and self._is_lenient():
            self._warn_of_repeated()
        return {
            "digest": self._state(),
            "probe": self._probe,
            "sample": self._sample,
            "state": self._sampled,
            "whole": self._whole(),
            "newcomer": self.newcomer,
            "agreed": self.agreement.step,
            "computed": tuple(self.repeats.computed.items()),
            "repeated": tuple(self.repeats.repeated.items()),
        }

    def _warn_of_repeated(self) -> None:
        differing = self.repeats.differing()
        if differing is not None:
            self._warn(repeated_alone(differing))
        self.repeats.give_up()
        self.repeats.disturbed()

    def check(self, combined: Combined, ledger: Ledger, buffer_name: Callable[[int], str]) -> bool:
        """Return whether the step counts; False: newcomers leave, and it is done again without them.

        Raises BitsDiffer if all are to end, NewcomerDiffers if this worker is.
        """
        if not combined.differs:
            return True
        if combined.outcasts:
            check_newcomer(combined, ledger.rank, ledger.members)
            return False
        check_bits(combined, ledger.members, self._rotating.names, buffer_name)
        return True

    def check_replayed(self, combined: Combined) -> None:
        """Of one that catches up: raise NewcomerDiffers if the others, who committed this step, have another microbatch 0."""
        own, self._sample = self._sample, b""
        check_sample(own, combined.sample, combined.step)

    def regrouped(self) -> None:
        """Under another membership the step is tried again: what is compared of the state begins anew with the next one."""
        self._state = self._whole = bytes
        self.repeats.disturbed()

    def committed(self, combined: Combined | None = None, computed: bool = True) -> None:
        """The step is committed: all computed the same, and need not be asked again. ``computed``: so did this worker."""
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
            self.agreement.hear(combined.step)
        self.agreement.hear(combined.agreed)


def hash_of(flats: Flats) -> bytes:
    """A digest of a gradient."""
    hasher = blake3()
    for tensor in flats.tensors:
        hasher.update(memoryview(tensor_bytes(tensor)))
    return bytes(hasher.digest(length=16))


def sample_of(flats: Flats) -> bytes:
    """A digest of some elements of a gradient, from all over each bucket: it takes no time that shows in a step."""
    hasher = blake3()
    for tensor in flats.tensors:
        hasher.update(memoryview(tensor_bytes(tensor[:: max(1, tensor.numel() // _SAMPLED)])))
    return bytes(hasher.digest(length=16))
