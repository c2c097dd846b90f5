"""Whether all members have the same bits: of one microbatch's gradient, and of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

from craft.protocol.errors import BitsDiffer, ConfigError
from craft.protocol.word import Combined
from craft.snapshots.state import tensor_bytes
from craft.worker.gradients import Flats

_SAMPLED = 1 << 14
"""Of each bucket."""


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
