"""Settle what the members of a new generation do with the step that was in flight.

Every member runs ``settle`` on the same claims and gets the same answer. It rests on the commit rule: a worker commits a
step only when every member of its generation acknowledged the complete result. Hence, if any worker, dead or alive,
committed step s under generation g, every member of g that is still here holds the result of s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from craft.decide.step.plan import DROPPED, give_out, plan
from craft.decide.step.replicas import Layout, fit_replicas, held_by, with_state
from craft.protocol.errors import CallsDiffer, ProtocolViolation, StateLost
from craft.protocol.membership import Claim, Settlement

LossAnswer = Literal["redo", "shrink", "wait", "auto"]

NO_PART = -1
"""In place of a number of collective calls: this member takes no part in them, since it is catching up."""


def settle(
    claims: Sequence[Claim],
    size_of: Callable[[int], int],
    on_loss: LossAnswer = "redo",
    layout: Layout | None = None,
) -> Settlement:
    """Return the settlement; ``claims`` are in the order of ranks.

    ``size_of(step)`` is the number of microbatches of a step: fewer in a last, partial batch, 0 past the end. ``layout``: the
    members by replica and position; None: every replica is one worker.
    """
    layout = layout or Layout()
    claims = _without_stragglers(claims)
    stateful = [claim for claim in claims if claim.committed is not None]
    if not stateful:
        raise StateLost("every worker that had the training state is gone: nothing is left to go on from")
    if (rewinds := _rewinds(stateful)) > min(claim.rewinds for claim in stateful):
        return _go_back(claims, layout, rewinds, on_loss)
    top = max(claim.committed for claim in stateful if claim.committed is not None)
    behind = [claim for claim in stateful if claim.committed != top]
    for claim in behind:
        if claim.committed != top - 1 or claim.result is None:
            raise ProtocolViolation(
                f"worker {claim.worker_id} has committed {claim.committed} steps and another member {top},"
                " but it does not hold the result in between"
            )
    if not behind and _all_hold_one_result(stateful):
        # A worker that is gone may have committed it; and committing a complete result is always right.
        commits = tuple(claim.worker_id for claim in stateful)
        return _fresh(top + 1, commits, claims, layout, size_of(top + 1), calls=0)
    return _resume(top, claims, layout, behind, size_of(top), on_loss)


def _without_stragglers(claims: Sequence[Claim]) -> Sequence[Claim]:
    """Drop the state of joiners that missed a rewind: it is of no use."""
    done = max(claim.rewinds for claim in claims)
    return [
        replace(claim, committed=None, result=None, held=(), pending=(), size=0)
        if claim.rewinds < done and claim.rewind_to is None
        else claim
        for claim in claims
    ]


def _rewinds(claims: Sequence[Claim]) -> int:
    """Return how often every member is to have gone back to a checkpoint.

    As for a step: a worker that went back knew that every member had read and verified that checkpoint.
    """
    in_hand = {claim.rewind_to for claim in claims}
    # A worker that is gone may have gone back; and going back is right, since all are about to.
    all_hold_one = len(in_hand) == 1 and in_hand != {None} and len({claim.rewinds for claim in claims}) == 1
    return max(claim.rewinds for claim in claims) + (1 if all_hold_one else 0)


def _go_back(claims: Sequence[Claim], layout: Layout, rewinds: int, on_loss: LossAnswer) -> Settlement:
    """Let members that have not gone back do so; then resume the step as far as any member began it."""
    back = [
        _at_target(claim, rewinds) if claim.committed is not None and claim.rewinds < rewinds else claim
        for claim in claims
    ]
    step = next(claim.committed for claim in back if claim.committed is not None)
    # If none began it, it is planned when it begins: only the checkpoint, not loaded yet, knows its size.
    return _resume(step, back, layout, (), max(claim.size for claim in back), on_loss)


def _at_target(claim: Claim, rewinds: int) -> Claim:
    if claim.rewind_to is None or claim.rewinds != rewinds - 1:
        raise ProtocolViolation(
            f"worker {claim.worker_id} has gone back {claim.rewinds} times and another member {rewinds} times,"
            " but it does not hold the checkpoint in between"
        )
    branch, step = claim.rewind_to
    return Claim(
        worker_id=claim.worker_id,
        branch=branch,
        committed=step,
        able=claim.able,
        started=claim.started,
        rewinds=rewinds,
        loop=claim.loop,
        first_step=claim.first_step,
    )


def _all_hold_one_result(claims: Sequence[Claim]) -> bool:
    """Return whether all hold the same result: results of different generations may differ under ``shrink``."""
    return claims[0].result is not None and all(claim.result == claims[0].result for claim in claims)


def _idle(claims: Sequence[Claim], layout: Layout, able: Sequence[int]) -> tuple[str, ...]:
    """Return the members that are not current. Others whose replica computes nothing, since it is short, stay current."""
    computing = frozenset(able)
    return tuple(
        claim.worker_id
        for rank, claim in enumerate(claims)
        if layout.replica_of(rank) not in computing
        and not (layout.slots and claim.committed is not None and claim.able)
    )


def _joiners(claims: Sequence[Claim], stateful: frozenset[int]) -> tuple[str, ...]:
    return tuple(claim.worker_id for rank, claim in enumerate(claims) if rank not in stateful)


def _history(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return what members with the state agree on; the one furthest in the script decides about the loop."""
    stands = max((claim for claim in claims if claim.committed is not None), key=lambda each: (each.loop, each.over))
    return {
        "branch": stands.branch,
        "rewinds": stands.rewinds,
        "loop": stands.loop,
        "over": stands.over,
        "first_step": stands.first_step,
    }


def _calls(claims: Sequence[Claim]) -> int:
    """Return how many collective calls since the last commit count as completed.

    As for a step: a worker that completed one knew that every member had all parts of it.
    """
    taking_part = [claim for claim in claims if claim.calls != NO_PART]
    done = max((claim.calls for claim in taking_part), default=0)
    late = [claim for claim in taking_part if claim.calls < done]
    for claim in late:
        if claim.calls != done - 1 or claim.call_result is None:
            raise ProtocolViolation(
                f"worker {claim.worker_id} completed {claim.calls} collective calls and another member {done},"
                " but it does not hold the result in between"
            )
    in_hand = {claim.call_result for claim in taking_part}
    all_hold_one = not late and len(in_hand) == 1 and in_hand != {None}
    return done + 1 if all_hold_one else done


IN_UPDATE = "the update of a step"
"""In place of a call: this worker of a sharded replica waits in its update, before the calls that the script makes there."""
LOOP_END = "steps: its end"
"""The call in which workers meet at the end of a loop."""


def _check_calls(claims: Sequence[Claim], calls: int) -> None:
    """Raise CallsDiffer if some are in a call that others, at the same step, have passed: it would never return."""
    # One that waits in its update is in no call, and has passed none: its twins may be in the next step already.
    waiting = [claim for claim in claims if claim.call not in ("", IN_UPDATE) and claim.calls == calls]
    # A member in no call when a generation begins is in the next step, or at the end; unless it catches up.
    beyond = [claim.worker_id for claim in claims if not claim.call and claim.calls == calls and claim.able]
    if not waiting or not beyond:
        return
    call, step = waiting[0].call, waiting[0].committed or 0
    within = [claim.worker_id for claim in waiting]
    if call == LOOP_END:
        raise CallsDiffer(
            f"{', '.join(within)} left the loop over the steps after step {step - 1}, as by break, but {', '.join(beyond)} went"
            " on: every worker has to leave it after the same step. Decide by what is the same on all of them (step.metrics, what"
            " job.evaluate or job.once returned), or call job.stop(reason) on any worker"
        )
    raise CallsDiffer(
        f"{name_of(call)} after step {step - 1}: {', '.join(within)} {'waits' if len(within) == 1 else 'wait'} in it, but"
        f" {', '.join(beyond)} went on without it: every worker has to make the same calls between the steps"
    )


def name_of(call: str) -> str:
    """Return a collective call as the user knows it."""
    if " " in call:
        return call
    return f"job.{call}" if call.endswith(")") else f"job.{call}()"


def _fresh(
    step: int, commits: tuple[str, ...], claims: Sequence[Claim], layout: Layout, num_microbatches: int, calls: int
) -> Settlement:
    """Let all begin ``step`` together; none has begun it yet."""
    stateful = with_state(claims, layout)
    able = fit_replicas(claims, layout, stateful)
    owners = tuple(able[owner] for owner in plan(num_microbatches, len(able)))
    return Settlement(
        step=step,
        commits=commits,
        owners=owners,
        given=(),
        idle=_idle(claims, layout, able),
        joiners=_joiners(claims, stateful),
        calls=calls,
        **_history(claims),
    )


def _resume(
    top: int,
    claims: Sequence[Claim],
    layout: Layout,
    behind: Sequence[Claim],
    num_microbatches: int,
    on_loss: LossAnswer,
) -> Settlement:
    """Resume step ``top``: held and begun microbatches stay, the rest is given out anew."""
    commits = tuple(claim.worker_id for claim in behind)
    started = [claim for claim in claims if claim.committed == top]
    calls = _calls(started)
    _check_calls(started, calls)
    if not any(claim.held or claim.pending for claim in started):
        return _fresh(top, commits, claims, layout, num_microbatches, calls)
    stateful = with_state(claims, layout)
    able = fit_replicas(claims, layout, stateful)
    owners, held, loads = _taken(claims, layout, top, num_microbatches)
    missing = tuple(microbatch for microbatch, owner in enumerate(owners) if owner is None)
    if on_loss == "shrink" and not behind and len(missing) < num_microbatches:
        kept = tuple(DROPPED if owner is None else owner for owner in owners)
        missing = ()
    else:
        if on_loss == "wait" and missing and not layout.slots:
            # The replacement computes the microbatches of the lost worker. Not in a replica: its other workers are in the middle
            # of the step, and take no beat for which it would wait at the step's beginning.
            joining = set(range(len(claims))).difference(stateful)
            able = sorted(joining.union(able))
            loads = [load + (0 if rank in joining else num_microbatches) for rank, load in enumerate(loads)]
        kept = give_out(owners, loads, idle=frozenset(range(len(loads))).difference(able))
    return Settlement(
        step=top,
        commits=commits,
        owners=kept,
        given=missing,
        idle=_idle(claims, layout, able),
        joiners=_joiners(claims, stateful),
        held=held,
        calls=calls,
        **_history(claims),
    )


def _taken(
    claims: Sequence[Claim], layout: Layout, top: int, num_microbatches: int
) -> tuple[list[int | None], tuple[int, ...], list[int]]:
    """Return the owner of each microbatch of step ``top``, which ones are held, and what each replica still has to compute."""
    owners: list[int | None] = [None] * num_microbatches
    found = {replica: held_by(claims, layout, replica, top) for replica in layout.complete(len(claims))}
    loads = [0] * (max(found) + 1)
    for replica, (held, _) in found.items():
        for microbatch in held:
            # Held by two only through a late message; both copies have the same bits.
            if owners[microbatch] is None:
                owners[microbatch] = replica
    whole = tuple(microbatch for microbatch, owner in enumerate(owners) if owner is not None)
    for replica, (_, pending) in found.items():
        for microbatch in pending:
            if owners[microbatch] is None:
                owners[microbatch] = replica
                loads[replica] += 1
    return owners, whole, loads
