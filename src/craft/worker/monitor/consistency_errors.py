"""Errors and messages for workers with different bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from craft.protocol.control_word import Combined, Groups, Repeated
from craft.protocol.errors import BitsDiffer, NewcomerDiffers

Names = Callable[[int], Sequence[str]]


def check_sample(own: bytes, theirs: bytes, step: int) -> None:
    """Raise NewcomerDiffers if a worker that has just joined computes other bits than the others.

    Nothing that it computed counts yet. An empty digest was not taken.
    """
    if own and theirs and own != theirs:
        raise NewcomerDiffers(
            f"microbatch 0 of step {step} has other bits here than on those who have trained so far, though this"
            " worker has their state: the script's loop changes something that is neither replicated nor registered"
            " (an attribute, such as a dropout rate; a counter), or this host has other data or another kind of device."
            " Register it (job.register_state), or set it from step.number in every step; --no-check-bits lets such workers in"
        )


def check_newcomer(combined: Combined, rank: int, members: Sequence[str]) -> None:
    """Raise NewcomerDiffers if the worker of ``rank`` joined and has another state than the others."""
    if rank not in combined.outcasts:
        return
    others = ", ".join(each for other, each in enumerate(members) if other not in combined.outcasts)
    what = "other bits in microbatch 0" if combined.unequal_probes else "another state"
    raise NewcomerDiffers(
        f"after it joined, {members[rank]} has {what} at step {combined.step} than {others}, who train on without it: its code"
        " does not do the same as theirs, since something that it uses is not registered (an optimizer, a scheduler, a moving"
        " average, a counter). Register it with job.register or job.register_state, or set it from step.number in every step"
    )


def check_bits(combined: Combined, members: Sequence[str], names: Names, buffer_name: Callable[[int], str]) -> None:
    """Raise BitsDiffer if the combined words of a step show a difference; ``names(step)`` lists what was compared."""
    if combined.unequal_probes:
        raise BitsDiffer(
            f"microbatch 0 of step {combined.step} gave different bits on {_groups(members, combined.unequal_probes)}:"
            " they need the same data, the same kind of device, thread count and torch version, and deterministic kernels"
            " (torch.use_deterministic_algorithms(True)); or switch the check off with --no-check-bits"
        )
    if (buffer := combined.unequal_buffer) is not None:
        raise BitsDiffer(
            f"{buffer_name(buffer.index)} differs between {_groups(members, buffer.groups)} as step {combined.step} begins:"
            " code between the steps changed this buffer on some workers only, as a forward pass in train() on the leader"
            " does. It must do the same on every worker: there call model.eval() first, or use copy.deepcopy(model)"
        )
    for each in combined.repeated:
        if not each.equal:
            raise BitsDiffer(_repeated(each, combined.step, members))
    if combined.unequal_digests:
        compared = names(combined.step)
        more = f" or {len(compared) - 4} more" if len(compared) > 4 else ""
        raise BitsDiffer(
            f"after {combined.step} steps the state differs between {_groups(members, combined.unequal_digests)}"
            f" (in or near {', '.join(compared[:4])}{more}):"
            " code between the steps must do the same on every worker"
        )
    if groups := combined.unequal_states or combined.unequal_wholes:
        raise BitsDiffer(
            f"after {combined.step} steps the state differs between {_groups(members, groups)}:"
            " code between the steps must do the same on every worker"
        )


def _repeated(found: Repeated, step: int, members: Sequence[str]) -> str:
    who = (
        f"gave other bits when {members[found.owner]} computed it again"
        if found.owner == found.other
        else f"gave other bits on {members[found.other]} than on {members[found.owner]}"
    )
    return (
        f"microbatch {found.microbatch} of step {step} {who}: it depends on what the same worker computed before it, so that"
        f" the result would depend on the number of workers. {_LOOK_FOR}"
    )


def repeated_alone(microbatch: int) -> str:
    """Return the warning for a worker alone, on a device whose kernels need not be deterministic."""
    return (
        f"microbatch {microbatch} gave other bits when it was computed again: this run cannot be repeated bit for bit. Either"
        " kernels are not deterministic (torch.use_deterministic_algorithms(True) makes them so), or the microbatch depends on"
        f" what was computed before it. {_LOOK_FOR}"
    )


_LOOK_FOR = (
    "Look for state that is carried from one microbatch to the next: a hidden state, a torch.Generator of the script, a counter,"
    " a stream that ignores start_step, a dataset with a position. Carry it with step.carry(...), seed generators from"
    " step.number and step.microbatch, change registered state (job.register_state) only after the inner loop, and let a"
    " stream begin at start_step. A kernel that is not deterministic shows in the same way; --no-check-bits switches the check"
    " off"
)


def _groups(members: Sequence[str], groups: Groups) -> str:
    return " | ".join(", ".join(members[rank] for rank in group) for group in groups)
