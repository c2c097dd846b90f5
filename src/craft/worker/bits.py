"""Whether all members have the same bits: of one microbatch's gradient, and of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

from craft.protocol.errors import BitsDiffer
from craft.protocol.word import Combined
from craft.snapshots.state import tensor_bytes
from craft.worker.gradients import Flats


def hash_of(flats: Flats) -> bytes:
    """A digest of a gradient."""
    hasher = blake3()
    for tensor in flats.tensors:
        hasher.update(memoryview(tensor_bytes(tensor)))
    return bytes(hasher.digest(length=16))


def check_bits(combined: Combined, members: Sequence[str], names: Callable[[int], Sequence[str]]) -> None:
    """Raise BitsDiffer if the words of a step say so; ``names(step)`` are those of what was compared of the state."""
    if combined.unequal_probes:
        raise BitsDiffer(
            f"microbatch 0 of step {combined.step} gave different bits on {_groups(members, combined.unequal_probes)}:"
            " they need the same kind of device, thread count and torch version, and deterministic kernels"
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
