"""One worker's own progress: what it holds, what it has promised, and when it may commit.

The worker's main thread owns the only copy and replaces it by what these functions return; the exhaustive search drives
the very same functions. The order of calls in a generation is: enter, claim, settled, then hold ... hold, complete,
acknowledged ... acknowledged, commit.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from craft.decide.plan import DROPPED, plan, share_of
from craft.protocol.errors import ProtocolViolation
from craft.protocol.membership import Claim, Generation, Settlement


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    branch: int = 0
    committed: int | None = 0
    """Number of committed steps; None while this worker has no state."""
    generation: int = 0
    """The newest generation it entered. To enter is a promise: it never commits under an older one."""
    members: tuple[str, ...] = ()
    settled: bool = False
    """Whether the claims of this generation are settled. Before that it takes part in no exchange."""
    owners: tuple[int, ...] = ()
    """Who computes which microbatch of the step in flight; empty while that step has not begun here."""
    held: frozenset[int] = frozenset()
    result: int | None = None
    """The generation under which it got the whole result of the step in flight."""
    acknowledged_by: frozenset[str] = frozenset()

    @property
    def rank(self) -> int:
        return self.members.index(self.worker_id)

    @property
    def share(self) -> tuple[int, ...]:
        """The microbatches of the step in flight that are this worker's."""
        return share_of(self.owners, self.rank)

    @property
    def pending(self) -> tuple[int, ...]:
        """Those of its share that it has not computed yet."""
        return tuple(microbatch for microbatch in self.share if microbatch not in self.held)

    @property
    def may_commit(self) -> bool:
        """True when the result is whole here and every member, idle ones included, said that it is whole there."""
        return self.settled and self.result == self.generation and self.acknowledged_by >= frozenset(self.members)


def enter(ledger: Ledger, generation: Generation) -> Ledger:
    """Take part in a newer generation; from here on nothing can be committed under an older one."""
    if generation.number <= ledger.generation:
        raise ProtocolViolation(f"generation {generation.number} does not follow {ledger.generation}")
    rank = generation.rank_of(ledger.worker_id)
    if rank is None:
        raise ProtocolViolation(f"worker {ledger.worker_id} is not a member of generation {generation.number}")
    if ledger.generation < generation.members[rank].since:
        # The others went on without it, if it ever was with them: whatever it has is not the state of the job.
        ledger = replace(ledger, committed=None, owners=(), held=frozenset(), result=None)
    # What was given out under the old generation stays this worker's: its ranks are rewritten to the new ones.
    owners = tuple(rank if owner == ledger.rank else DROPPED for owner in ledger.owners) if ledger.owners else ()
    return replace(
        ledger,
        generation=generation.number,
        members=generation.worker_ids,
        settled=False,
        owners=owners,
        acknowledged_by=frozenset(),
    )


def claim(ledger: Ledger) -> Claim:
    """What this worker tells the other members of the generation that it has entered."""
    return Claim(
        worker_id=ledger.worker_id,
        branch=ledger.branch,
        committed=ledger.committed,
        result=ledger.result,
        held=tuple(sorted(ledger.held)),
        pending=ledger.pending if ledger.owners else (),
    )


def settled(ledger: Ledger, settlement: Settlement) -> Ledger:
    """Carry the settlement out: commit what is in hand if it says so, then go on with step ``level``."""
    if ledger.worker_id in settlement.commits:
        ledger = commit(ledger)
    if ledger.committed is not None and ledger.committed != settlement.level:
        raise ProtocolViolation(
            f"worker {ledger.worker_id} stands at step {ledger.committed}, the settlement at {settlement.level}"
        )
    # A result that is not committed now never will be: the step is taken up again.
    return replace(ledger, settled=True, owners=settlement.owners, result=None, acknowledged_by=frozenset())


def begin(ledger: Ledger, num_microbatches: int) -> Ledger:
    """Begin the next step in an undisturbed generation."""
    if ledger.owners:
        return ledger
    return replace(ledger, owners=plan(num_microbatches, len(ledger.members)))


def hold(ledger: Ledger, microbatch: int) -> Ledger:
    """The gradient of ``microbatch`` is in this worker's own buffers."""
    return replace(ledger, held=ledger.held | {microbatch})


def complete(ledger: Ledger) -> Ledger:
    """Every chunk, the buffers and the word of the step in flight are here: acknowledge it to every member."""
    if ledger.committed is None:
        raise ProtocolViolation(f"worker {ledger.worker_id} has no state yet and cannot acknowledge a result")
    return replace(ledger, result=ledger.generation, acknowledged_by=ledger.acknowledged_by | {ledger.worker_id})


def acknowledged(ledger: Ledger, by: str, generation: int, step: int) -> Ledger:
    """``by`` has the whole result of ``step`` under ``generation``; anything but the attempt at hand is ignored."""
    if generation != ledger.generation or step != ledger.committed or not ledger.settled:
        return ledger
    return replace(ledger, acknowledged_by=ledger.acknowledged_by | {by})


def commit(ledger: Ledger) -> Ledger:
    """Count the step in flight; its gradients need not be held any longer."""
    if ledger.committed is None or ledger.result is None:
        raise ProtocolViolation(f"worker {ledger.worker_id} has no result to commit")
    return replace(
        ledger,
        committed=ledger.committed + 1,
        owners=(),
        held=frozenset(),
        result=None,
        acknowledged_by=frozenset(),
    )


def adopt(ledger: Ledger, committed: int) -> Ledger:
    """A joiner's state is whole: it stands where its donors stood."""
    return replace(ledger, committed=committed)
