"""Check before the first step that every worker has the same settings, conditions and state."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch
from msgspec.structs import replace

from craft.groups.group import Group
from craft.protocol.errors import ConfigError
from craft.protocol.events import ParametersUnequal
from craft.snapshots.state.leaves import Leaf, digest, digests
from craft.worker.membership.all_gather import gather
from craft.worker.state.metadata import Conditions

logger = logging.getLogger(__name__)

T = TypeVar("T")


def check_conditions(
    group: Group | None, worker_ids: Sequence[str], conditions: Conditions, start_step: int = 0
) -> None:
    """Compare all workers' conditions with rank 0's; raise ConfigError, on every worker, if they differ.

    ``start_step`` is compared only here: a worker that joins later may have read a newer file of the script.
    """
    conditions = replace(conditions, settings=conditions.settings | {"start_step": start_step})
    everyone = _gathered(group, conditions, Conditions)
    for worker_id, other in zip(worker_ids, everyone, strict=True):
        problem = compare(worker_ids[0], everyone[0], worker_id, other)
        if problem is not None:
            raise ConfigError(problem)


def _gathered(group: Group | None, own: T, kind: type[T]) -> list[T]:
    """Return the values of all workers, in the order of ranks."""
    return [msgspec.json.decode(data, type=kind) for data in gather(group, msgspec.json.encode(own))]


def compare(first_id: str, first: Conditions, worker_id: str, other: Conditions) -> str | None:
    """Return the first difference between two workers' conditions as a sentence; None if they are equal."""
    mine, theirs = msgspec.to_builtins(first), msgspec.to_builtins(other)
    for key in ("device", "torch_version", "num_threads", "deterministic"):
        if theirs[key] != mine[key]:
            return (
                f"worker {worker_id} has {key}={theirs[key]!r} and {first_id} has {mine[key]!r}:"
                " results would depend on which worker computes what; make them the same"
            )
    for key in sorted(mine["settings"].keys() | theirs["settings"].keys()):
        ours, others = mine["settings"].get(key), theirs["settings"].get(key)
        if others != ours:
            return (
                f"worker {worker_id} has {key}={others!r} and {first_id} has {ours!r}:"
                " every worker must pass the same to job.steps, and every host the same to craft run"
            )
    return None


@torch.no_grad()
def make_equal(group: Group | None, worker_ids: Sequence[str], leaves: Sequence[Leaf]) -> ParametersUnequal | None:
    """Copy rank 0's state to workers that differ; return what differed, None if nothing did."""
    if group is None:
        return None
    own = digest(list(leaves))
    everyone = [data.decode() for data in gather(group, own.encode())]
    if len(set(everyone)) == 1:
        return None
    _check_structure(group, worker_ids, leaves)
    differing = _first_difference(group, leaves)
    unequal = [rank for rank, value in enumerate(everyone) if value != everyone[0]]
    for leaf in leaves:
        if isinstance(leaf.value, torch.Tensor):
            _copy_from_first(group, unequal, leaf.value)
    still = [data.decode() for data in gather(group, digest(list(leaves)).encode())]
    if len(set(still)) != 1:
        raise ConfigError(
            f"workers begin with different values of {_first_difference(group, leaves)}, which cannot be copied from"
            f" {worker_ids[0]}: make it the same in every worker (CRAFT can copy only tensors that state_dict() returns"
            " by reference)"
        )
    found = ParametersUnequal(
        worker_ids=tuple(worker_ids[rank] for rank in unequal), source=worker_ids[0], first=differing
    )
    logger.warning(
        "initial parameters of %s differ from %s (first: %s): copied those of %s",
        ", ".join(found.worker_ids), found.source, found.first, found.source,
    )  # fmt: skip
    return found


def _check_structure(group: Group, worker_ids: Sequence[str], leaves: Sequence[Leaf]) -> None:
    """Raise ConfigError, on every worker, unless all have the same names, types and shapes."""
    everyone = _gathered(group, [(leaf.name, _kind(leaf.value)) for leaf in leaves], list[tuple[str, str]])
    first = everyone[0]
    for worker_id, other in zip(worker_ids, everyone, strict=True):
        for mine, theirs in itertools.zip_longest(first, other):
            if mine == theirs:
                continue
            if mine is not None and theirs is not None and mine[0] == theirs[0]:
                name, what = mine[0], f"{mine[1]} and {theirs[1]}"
            else:
                name = (mine or theirs)[0]
                what = f"which {worker_id if mine is not None else worker_ids[0]} does not have there"
            raise ConfigError(
                f"workers {worker_ids[0]} and {worker_id} have models or registered objects of different structure,"
                f" first in {name} ({what}): build the same in every worker"
            )


def _kind(value: torch.Tensor | bytes) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else "a plain value"


def _first_difference(group: Group, leaves: Sequence[Leaf]) -> str:
    """Return the name of the first entry that differs between workers of equal structure."""
    everyone = _gathered(group, digests(list(leaves)), list[tuple[str, str]])
    for position, (name, value) in enumerate(everyone[0]):
        if any(other[position][1] != value for other in everyone):
            return name
    return ""


def _copy_from_first(group: Group, unequal: Sequence[int], tensor: torch.Tensor) -> None:
    if tensor.numel() == 0:
        return
    if group.rank == 0:
        flat = tensor.detach().cpu().contiguous()
        for pending in [group.send(flat, rank, 0) for rank in unequal]:
            pending.wait()
    elif group.rank in unequal:
        flat = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        group.recv(flat, 0, 0).wait()
        tensor.copy_(flat)
