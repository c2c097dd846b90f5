"""A checkpoint that all workers take together, and what each of them writes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from craft.protocol.membership import Generation
from craft.snapshots.checkpoint.writer import CheckpointShare
from craft.snapshots.store.manifest import PartOfPosition, name_of


class DueCheckpoint(NamedTuple):
    """A checkpoint that all have agreed to take at the next step boundary."""

    step: int
    """Committed steps that it will include."""
    branch: int
    tag: str | None
    generation: Generation
    """Generation in which they agreed; its members that are there then take part."""
    members: tuple[str, ...]
    """Workers that write a share, in share order."""
    agreed: bool = False
    """Agreed by the control word of a step, not by a call of the script."""

    @property
    def name(self) -> str:
        # Several with different tags may be taken at one step.
        tag = hashlib.blake2b(self.tag.encode(), digest_size=4).hexdigest() if self.tag is not None else "0"
        return name_of(self.branch, self.step, f"{self.generation.number}_{self.generation.nonce}_{tag}")

    def share_of(self, worker_id: str) -> CheckpointShare:
        """Return what a worker writes of it."""
        return CheckpointShare(
            name=self.name,
            branch=self.branch,
            step=self.step,
            generation=self.generation.number,
            tag=self.tag,
            part=self.members.index(worker_id),
            of=len(self.members),
            place=place_of(worker_id, self.generation, self.members),
        )


def place_of(worker_id: str, generation: Generation, members: Sequence[str]) -> PartOfPosition | msgspec.UnsetType:
    """Return what a worker writes of a sharded checkpoint: twins divide their position's state; unset if it is not sharded."""
    if generation.replica_size is msgspec.UNSET:
        return msgspec.UNSET
    slots = {each.worker_id: each.slot for each in generation.members if each.slot is not msgspec.UNSET}
    position = slots[worker_id].position
    twins = [each for each in members if each in slots and slots[each].position == position]
    return PartOfPosition(position, generation.replica_size, twins.index(worker_id), len(twins))


def share_in(worker_id: str, generation: Generation, members: Sequence[str]) -> tuple[int, int]:
    """Return which share of its state a worker writes, and how many shares there are."""
    place = place_of(worker_id, generation, members)
    if place is msgspec.UNSET:
        return members.index(worker_id), len(members)
    return place.share, place.of_shares


def covers_positions(generation: Generation, members: Sequence[str]) -> bool:
    """Return whether ``members`` hold the state of every position, so that their checkpoint can be complete."""
    if generation.replica_size is msgspec.UNSET:
        return True
    slots = (each.slot for each in generation.members if each.worker_id in members)
    return len({slot.position for slot in slots if slot is not msgspec.UNSET}) == generation.replica_size


def with_members(generation: Generation, found: Sequence[tuple[str, Generation]]) -> Generation:
    """Return ``generation`` with all workers in ``found``, each as it is in the generation that it names beside itself.

    Where a replica is one worker, a worker's slot does not matter.
    """
    if generation.replica_size is msgspec.UNSET:
        return generation
    others = [each for worker_id, own in found for each in own.members if each.worker_id == worker_id]
    known = generation.worker_ids
    more = (each for each in others if each.worker_id not in known)
    return msgspec.structs.replace(generation, members=(*generation.members, *more))
