"""Whether all members have the same bits: of one microbatch's gradient, and of the state.

Enters: gradients and the state as the step in flight has them here. Leaves: digests for this worker's word, and a refusal
if the others' words say that theirs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blake3 import blake3

from craft.decide.ledger import Ledger
from craft.protocol.errors import BitsDiffer, ConfigError
from craft.protocol.word import Combined
from craft.snapshots.state import Leaf, RotatingDigest, tensor_bytes
from craft.worker.gradients import Flats

PROBE = -1
"""In place of a microbatch: microbatch 0 is computed once more, only to compare its bits."""
_SAMPLED = 1 << 14
"""Of each bucket."""


class Bits:
    """Those of this worker, in the step in flight. Belongs to the main thread."""

    def __init__(self, compares: bool, slice_bytes: int, leaves: Callable[[], list[Leaf]]) -> None:
        """``compares``: whether gradients are compared; of the state, ``slice_bytes`` are in each step."""
        self.probe_wanted = compares
        """Whether every worker computes microbatch 0 of this step."""
        self._compares = compares
        self._leaves = leaves
        self._rotating = RotatingDigest(slice_bytes)
        self._state: Callable[[], bytes] = bytes
        self._probe = b""
        self._sample = b""
        """Of microbatch 0, if it was computed here: what is told to whoever catches up, or was found while catching up."""

    def restart(self, step: int) -> None:
        """From ``step`` on all look at the same slices of the state, whoever they are and whenever they came."""
        self._rotating.restart(step)

    def look(self, step: int) -> None:
        """Look at the state while it is that of the last commit: forward changes buffers."""
        if self._rotating.due(step):
            self._rotating.refresh(self._leaves())
        self._state = self._rotating.take(step)
        self._sample = b""

    def probe_due(self, ledger: Ledger) -> bool:
        alone = len(ledger.members) == 1
        # The owner of microbatch 0 computes it anyway; a retry has no use for the comparison.
        return self.probe_wanted and not (self._probe or ledger.held or alone or 0 in ledger.share)

    def hasher(self, microbatch: int, ledger: Ledger) -> Callable[[Flats], bytes] | None:
        """What is to be known of the gradient of ``microbatch``, if anything is. A joiner that warms up computes PROBE."""
        if microbatch not in (0, PROBE):
            return None
        if self.probe_wanted:
            return hash_of
        return sample_of if self._compares and (microbatch == PROBE or ledger.idle) else None

    def found(self, hasher: Callable[[Flats], bytes] | None, digest: bytes) -> None:
        """That is known now."""
        if hasher is hash_of:
            self._probe = digest
        elif hasher is sample_of:
            self._sample = digest

    def told(self) -> dict[str, Any]:
        """What this worker's word says of them."""
        return {"digest": self._state(), "probe": self._probe, "sample": self._sample}

    def check(self, combined: Combined, members: Sequence[str]) -> None:
        """Raise BitsDiffer if the words of the step say that somebody's differ."""
        check_bits(combined, members, self._rotating.names)

    def check_replayed(self, combined: Combined) -> None:
        """Of one that catches up: raise ConfigError if the others, who committed this step, have another microbatch 0."""
        own, self._sample = self._sample, b""
        check_sample(own, combined)

    def regrouped(self) -> None:
        """Under another membership the step is tried again: what is compared of the state begins anew with the next one."""
        self._state = bytes

    def committed(self) -> None:
        """The step is committed: all computed the same, and need not be asked again."""
        self.probe_wanted = False
        self._probe = self._sample = b""


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


def check_sample(own: bytes, combined: Combined) -> None:
    """Raise ConfigError if a worker that has only just joined computes other bits than those who trained all the time.

    Nothing that it computed counts yet. Either is empty where it was not taken.
    """
    if own and combined.sample and own != combined.sample:
        raise ConfigError(
            f"microbatch 0 of step {combined.step} has other bits here than on those who have trained so far, though this"
            " worker has their state: the script changes something in its loop that is neither replicated nor registered"
            " (an attribute, such as a dropout rate; a counter), or this host has other data or another kind of device."
            " Register it (job.register_state), or set it from step.number in every step; --no-check-bits lets such workers in"
        )


def check_bits(combined: Combined, members: Sequence[str], names: Callable[[int], Sequence[str]]) -> None:
    """Raise BitsDiffer if the words of a step say so; ``names(step)`` are those of what was compared of the state."""
    if combined.unequal_probes:
        raise BitsDiffer(
            f"microbatch 0 of step {combined.step} gave different bits on {_groups(members, combined.unequal_probes)}:"
            " they need the same data, the same kind of device, thread count and torch version, and deterministic kernels"
            " (torch.use_deterministic_algorithms(True)); or switch the check off with --no-check-bits"
        )
    if combined.unequal_digests:
        compared = names(combined.step)
        more = f" or {len(compared) - 4} more" if len(compared) > 4 else ""
        raise BitsDiffer(
            f"after {combined.step} steps the state differs between {_groups(members, combined.unequal_digests)}"
            f" (in or near {', '.join(compared[:4])}{more}):"
            " code between the steps must do the same on every worker"
        )


def _groups(members: Sequence[str], groups: Sequence[Sequence[int]]) -> str:
    return " | ".join(", ".join(members[rank] for rank in group) for group in groups)
