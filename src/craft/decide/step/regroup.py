"""A worker's way from one generation into the next: it enters, claims, and carries out what all settle.

Entering is a promise and a cut: nothing is committed under an older generation afterwards, and a leaf that no beat confirmed
is discarded. The state is kept: a worker in the middle of an update claims the step after it, and ends the update later, with
the outputs that its twins recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from craft.decide.detect.stragglers import EVEN
from craft.decide.step.ledger import Ledger, commit, rewound
from craft.decide.step.plan import DROPPED
from craft.decide.step.replicas import layout_of
from craft.decide.step.settle import NO_PART
from craft.protocol.errors import ProtocolViolation
from craft.protocol.membership import Claim, Generation, Settlement


def enter(ledger: Ledger, generation: Generation) -> Ledger:
    """Enter a newer generation; from here on nothing can be committed under an older one."""
    if generation.number <= ledger.generation:
        raise ProtocolViolation(f"generation {generation.number} does not follow {ledger.generation}")
    rank = generation.rank_of(ledger.worker_id)
    if rank is None:
        raise ProtocolViolation(f"worker {ledger.worker_id} is not a member of generation {generation.number}")
    layout = layout_of(generation)
    mates = tuple(generation.members[mate].worker_id for mate in layout.mates(rank))
    if ledger.generation < generation.members[rank].since:
        # The others went on without it: what it has is not the state of the job.
        ledger = replace(ledger, has_state=False, can_compute=False)
    if ledger.leaf is not None:
        # No beat told that the others of its replica computed it whole.
        ledger = replace(ledger, held=ledger.held - {ledger.leaf}, leaf=None)
    if ledger.members and mates != ledger.mates:
        # Its replica is another one: what this worker holds has no counterparts at the other positions.
        ledger = replace(ledger, owners=(), held=frozenset(), again=frozenset())
    if not ledger.has_state:
        # Results without their state are useless in a generation that may begin at another step.
        ledger = replace(
            ledger, owners=(), held=frozenset(), again=frozenset(), result=None, calls=0, call_result=None, call=""
        )
    # Microbatches given out under the old generation stay this worker's, under its new rank.
    replica, old = layout.replica_of(rank), ledger.replica if ledger.owners else DROPPED
    owners = tuple(replica if owner == old else DROPPED for owner in ledger.owners)
    return replace(
        ledger,
        generation=generation.number,
        members=generation.worker_ids,
        layout=layout,
        settled=False,
        owners=owners,
        acknowledged_by=frozenset(),
    )


def ends_replica(ledger: Ledger, generation: Generation) -> bool:
    """Return whether ``generation``, of which this worker just heard, ends the groups of its replica at once.

    It does if it is without a worker of the replica: that one may still run, hear nothing, and never come to a beat. Any other
    generation waits for the next beat: it must not break the updates of replicas that lost no worker, or after one loss there
    may be no replica left that performs the update, and no output that the others could take.
    """
    return any(generation.rank_of(mate) is None for mate in ledger.mates)


def updates_together(ledger: Ledger, claims: Sequence[Claim], settlement: Settlement) -> bool:
    """Return whether the workers of this worker's replica perform the update that they are in, or what is left of it, together.

    ``ledger`` has carried out ``settlement``. They do if all are in it, and in each of their process groups all its members have
    the outputs of as many collectives: then each comes to the next one. One that has more does not make it again, and the
    others take the outputs that a twin recorded.
    """
    if not ledger.is_live:
        return False
    found: dict[tuple[int, tuple[int, ...]], dict[int, int]] = {}
    for position, rank in enumerate(ledger.layout.mates(ledger.rank)):
        claim = claims[rank]
        # One that commits in this settlement stands at the beginning of its update.
        progress = () if claim.worker_id in settlement.commits else claim.collectives
        if progress is UNSET:
            return False
        for each in progress:
            found.setdefault((each.group, each.positions), {})[position] = each.count
    return all(
        len({counts.get(position, 0) for position in positions}) == 1 for (_, positions), counts in found.items()
    )


def claim(ledger: Ledger) -> Claim:
    """Return what this worker claims to the other members of the generation that it entered."""
    return Claim(
        worker_id=ledger.worker_id,
        branch=ledger.branch,
        committed=ledger.committed,
        result=ledger.result,
        held=tuple(sorted(ledger.held)),
        pending=ledger.pending if ledger.owners else (),
        again=tuple(sorted(ledger.again)),
        size=len(ledger.owners),
        able=ledger.can_compute,
        calls=NO_PART if ledger.worker_id in ledger.idle else ledger.calls,
        call_result=ledger.call_result,
        call=ledger.call,
        rewinds=ledger.rewinds,
        rewind_to=ledger.rewind_to,
        loop=ledger.loop,
        over=ledger.over,
        first_step=ledger.first_step,
    )


def settled(ledger: Ledger, settlement: Settlement) -> Ledger:
    """Carry out the settlement: commit the result in hand if it says so, then go on with its ``step``."""
    if ledger.worker_id in settlement.commits:
        ledger = commit(ledger)
    if not ledger.has_state:
        ledger = replace(
            ledger,
            step=settlement.step,
            branch=settlement.branch,
            rewinds=settlement.rewinds,
            rewind_to=None,
            over=settlement.over,
            first_step=settlement.first_step,
        )
    elif ledger.rewinds < settlement.rewinds:
        # Raises in a joiner that missed the rewind: it must end.
        ledger = rewound(ledger)
    elif ledger.worker_id in settlement.idle:
        # A worker that catches up learns only from this that the others left the loop.
        ledger = replace(ledger, over=ledger.over or settlement.over)
    if ledger.step != settlement.step:
        raise ProtocolViolation(
            f"worker {ledger.worker_id} stands at step {ledger.step}, the settlement at {settlement.step}"
        )
    # A result that is not committed now never will be: the step is computed again.
    return replace(
        ledger,
        settled=True,
        owners=settlement.owners,
        held=_still_held(ledger, settlement),
        again=frozenset(),
        idle=frozenset(settlement.idle),
        result=None,
        acknowledged_by=frozenset(),
        calls=settlement.calls,
        call_result=None,
        call=ledger.call if ledger.calls == settlement.calls else "",
        # Joiners have not seen the speeds that the others measured: all begin anew.
        pace=EVEN,
    )


def _still_held(ledger: Ledger, settlement: Settlement) -> frozenset[int]:
    """Return what stays held: what its replica is to compute again is let go."""
    if ledger.layout.replica_size == 1 or not ledger.held:
        return ledger.held
    return frozenset(
        each for each in ledger.held if settlement.owners[each] == ledger.replica and each in settlement.held
    )
