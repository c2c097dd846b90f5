"""What the members of a new generation do with the step that was in flight.

Every member runs ``settle`` on the same claims and so comes to the same answer. It rests on the commit rule: a worker
commits a step only when every member of its generation has acknowledged the whole result. Hence, if anybody, dead or
alive, committed step s under generation g, every member of g that is still here has the result of s in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from craft.decide.plan import DROPPED, give_out, plan
from craft.protocol.errors import ProtocolViolation
from craft.protocol.membership import Claim, Settlement

LossAnswer = Literal["redo", "shrink"]


def settle(claims: Sequence[Claim], size_of: Callable[[int], int], on_loss: LossAnswer = "redo") -> Settlement:
    """Return the common course of action; ``claims`` are in the order of ranks.

    ``size_of(step)`` is the number of microbatches of a step: fewer in a last, partial batch, 0 past the end.
    """
    with_state = [claim for claim in claims if claim.committed is not None]
    if not with_state:
        raise ProtocolViolation("no member of the new generation has any state: nothing to go on from")
    top = max(claim.committed for claim in with_state if claim.committed is not None)
    behind = [claim for claim in with_state if claim.committed != top]
    for claim in behind:
        if claim.committed != top - 1 or claim.result is None:
            raise ProtocolViolation(
                f"worker {claim.worker_id} has committed {claim.committed} steps and another member {top},"
                " but it does not hold the result in between"
            )
    joiners = frozenset(rank for rank, claim in enumerate(claims) if claim.committed is None)
    if not behind and _all_hold_one_result(with_state):
        # Somebody who is gone may have committed it; and committing it is always right, since it is whole.
        return _fresh(top + 1, tuple(claim.worker_id for claim in with_state), size_of(top + 1), len(claims), joiners)
    return _resume(top, claims, behind, size_of(top), on_loss, joiners)


def _all_hold_one_result(claims: Sequence[Claim]) -> bool:
    """Results of different generations may differ (under ``shrink``): only one and the same result may be committed."""
    return claims[0].result is not None and all(claim.result == claims[0].result for claim in claims)


def _fresh(
    level: int, commits: tuple[str, ...], num_microbatches: int, num_ranks: int, joiners: frozenset[int]
) -> Settlement:
    """Everyone begins step ``level`` together, and nobody has begun it yet."""
    able = [rank for rank in range(num_ranks) if rank not in joiners]
    owners = tuple(able[owner] for owner in plan(num_microbatches, len(able)))
    return Settlement(level=level, commits=commits, owners=owners, given=())


def _resume(
    top: int,
    claims: Sequence[Claim],
    behind: Sequence[Claim],
    num_microbatches: int,
    on_loss: LossAnswer,
    joiners: frozenset[int],
) -> Settlement:
    """Step ``top`` goes on: what is held stays held, what is begun stays begun, the rest is given out anew."""
    commits = tuple(claim.worker_id for claim in behind)
    started = [claim for claim in claims if claim.committed == top]
    if not any(claim.held or claim.pending for claim in started):
        return _fresh(top, commits, num_microbatches, len(claims), joiners)
    owners: list[int | None] = [None] * num_microbatches
    loads = [0] * len(claims)
    for rank, claim in enumerate(claims):
        if claim.committed == top:
            for microbatch in claim.held:
                # Held by two: only through a late message; the lower rank's copy is used, both are the same bits.
                if owners[microbatch] is None:
                    owners[microbatch] = rank
    for rank, claim in enumerate(claims):
        if claim.committed == top:
            for microbatch in claim.pending:
                if owners[microbatch] is None:
                    owners[microbatch] = rank
                    loads[rank] += 1
    missing = tuple(microbatch for microbatch, owner in enumerate(owners) if owner is None)
    if on_loss == "shrink" and not behind and len(missing) < num_microbatches:
        kept = tuple(DROPPED if owner is None else owner for owner in owners)
        return Settlement(level=top, commits=commits, owners=kept, given=())
    return Settlement(level=top, commits=commits, owners=give_out(owners, loads, idle=joiners), given=missing)
