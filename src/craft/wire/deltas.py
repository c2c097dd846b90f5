"""Send directives as differences, so that a generation of thousands of members is sent in full only once.

``Dispatch`` makes updates; the agent's ``Relay`` restores the full directives.
"""

from __future__ import annotations

from msgspec.structs import replace

from craft.protocol.errors import MalformedMessage
from craft.protocol.heartbeats import GenerationChange, Update
from craft.protocol.membership import Generation
from craft.protocol.messages import Directive


def difference(old: Directive, new: Directive) -> Update | None:
    """Return ``new`` as an update of ``old``; None if it cannot be expressed as one, for example in another order."""
    bases = [each for each in (old.generation, old.upcoming) if each is not None]
    generation = upcoming = None
    if new.generation is not None:
        generation = _change(bases, new.generation)
        if generation is None:
            return None
    if new.upcoming is not None:
        upcoming = _change([*bases, *([new.generation] if new.generation is not None else [])], new.upcoming)
        if upcoming is None:
            return None
    return Update(directive=replace(new, generation=None, upcoming=None), generation=generation, upcoming=upcoming)


def updated(old: Directive | None, update: Update) -> Directive:
    """Return the directive that ``update`` describes; raise MalformedMessage if ``old`` is not its base."""
    bases = [each for each in (old.generation, old.upcoming) if each is not None] if old is not None else []
    generation = _applied(bases, update.generation) if update.generation is not None else None
    if generation is not None:
        bases.append(generation)
    upcoming = _applied(bases, update.upcoming) if update.upcoming is not None else None
    return replace(update.directive, generation=generation, upcoming=upcoming)


def _change(bases: list[Generation], new: Generation) -> GenerationChange | None:
    for base in bases:
        if base is new or base == new:
            return GenerationChange(base=base.name, number=new.number, nonce=new.nonce)
    changes = [found for base in bases if (found := _changed(base, new)) is not None]
    return min(changes, key=lambda change: len(change.without) + len(change.placed), default=None)


def _changed(base: Generation, new: Generation) -> GenerationChange | None:
    before = {member.worker_id: member for member in base.members}
    # Most members are the same objects, so that identity settles it.
    kept = {
        member.worker_id
        for member in new.members
        if (old := before.get(member.worker_id)) is not None and (old is member or old == member)
    }
    change = GenerationChange(
        base=base.name,
        number=new.number,
        nonce=new.nonce,
        without=tuple(worker_id for worker_id in before if worker_id not in kept),
        placed=tuple((rank, member) for rank, member in enumerate(new.members) if member.worker_id not in kept),
    )
    return change if _applied([base], change).members == new.members else None


def _applied(bases: list[Generation], change: GenerationChange) -> Generation:
    base = next((each for each in bases if each.name == change.base), None)
    if base is None:
        raise MalformedMessage(f"an update of generation {change.base}, which was not sent before", "$.generation.base")
    without = frozenset(change.without)
    members = [member for member in base.members if member.worker_id not in without]
    for rank, member in change.placed:
        members.insert(rank, member)
    return replace(base, number=change.number, nonce=change.nonce, members=tuple(members))
