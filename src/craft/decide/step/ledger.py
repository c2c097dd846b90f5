"""One worker's progress: what it holds, what it promised, and when it may commit.

The worker's main thread owns the only copy and replaces it by what these functions return; the exhaustive search drives
the same functions. The order of calls in a generation is: enter, claim, settled (``regroup``), then begin, hold ... hold,
complete, acknowledged ... acknowledged, commit. In a replica of several workers there is a beat (``beat``) before each
microbatch, before the exchange and before the commit; ``confirmed`` takes in the first two.

A joiner makes the same calls while its state is still in transfer: it queues the results. The state as of step s and
the results from s to t-1 give the state as of step t: ``adopt`` does that.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from craft.decide.detect.stragglers import EVEN, MemberSpeeds
from craft.decide.step.plan import DROPPED, plan, share_of
from craft.decide.step.replicas import Layout, able_replicas
from craft.protocol.errors import ProtocolViolation


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    branch: int = 0
    step: int = 0
    """The step in flight. With the training state, it is also the number of committed steps."""
    has_state: bool = True
    """Whether this worker has the training state, or everything to bring it to ``step``."""
    can_compute: bool = True
    """Whether this worker can be given microbatches."""
    generation: int = 0
    """The newest generation it entered. Entering is a promise: it never commits under an older one."""
    members: tuple[str, ...] = ()
    layout: Layout = Layout()
    """The members by replica and position."""
    idle: frozenset[str] = frozenset()
    """Members that are not current: their replicas are given no microbatches. All members agree on them."""
    settled: bool = False
    """Whether the claims of this generation are settled. Before that it joins no exchange."""
    owners: tuple[int, ...] = ()
    """The replica that owns each microbatch of the step in flight; empty before that step begins here."""
    held: frozenset[int] = frozenset()
    leaf: int | None = None
    """Of ``held``: the one that was computed since the last beat. It is not merged into a sum yet."""
    again: frozenset[int] = frozenset()
    """Of its share: microbatches that it computed, released, and computes again."""
    result: int | None = None
    """The generation under which it got the complete result of the step in flight."""
    acknowledged_by: frozenset[str] = frozenset()
    calls: int = 0
    """Collective calls between the steps, completed since the last commit."""
    call_result: int | None = None
    """The generation under which it got all parts of the current collective call."""
    call: str = ""
    """The name of that call."""
    pace: MemberSpeeds = EVEN
    """Which members are slow. All agree on it, by the control words of this generation: the plan depends on it."""
    rewinds: int = 0
    """How often it went back to a checkpoint; starting from one counts too."""
    rewind_to: tuple[int, int] | None = None
    """(branch, step) of the checkpoint that it read and verified, if all are about to go back to one."""
    loop: int = 1
    """The script's current training loop, or the last one that ended; from 1."""
    over: bool = False
    """Whether every member reached the end of that loop."""
    first_step: int = 0
    """The number of that loop's first step."""

    @property
    def committed(self) -> int | None:
        """Number of committed steps; None while this worker has no state."""
        return self.step if self.has_state else None

    @property
    def rank(self) -> int:
        return self.members.index(self.worker_id)

    @property
    def replica(self) -> int:
        """This worker's replica; where every replica is one worker, its rank."""
        return self.layout.replica_of(self.rank)

    @property
    def mates(self) -> tuple[str, ...]:
        """The workers of its replica, itself included, in the order of positions."""
        return tuple(self.members[rank] for rank in self.layout.mates(self.rank))

    @property
    def is_complete(self) -> bool:
        """Whether its replica has a worker at every position; else it computes nothing."""
        return not self.layout.slots or self.layout.is_complete(self.replica)

    @property
    def is_live(self) -> bool:
        """Whether the workers of its replica, of which there are several, compute together: none is missing or behind.

        Before a commit it says whether they perform the update together; else each takes the outputs that a twin recorded.
        """
        return bool(self.layout.slots) and self.replica in able_replicas(self.layout, self.members, self.idle)

    @property
    def share(self) -> tuple[int, ...]:
        """The microbatches of the step in flight that its replica computes."""
        return share_of(self.owners, self.replica)

    @property
    def plan(self) -> tuple[str | None, ...]:
        """The worker that computes each microbatch of the step in flight (of a replica, position 0); None if it is dropped."""
        first = self.layout.ranks_of
        return tuple(None if owner == DROPPED else self.members[first(owner)[0]] for owner in self.owners)

    @property
    def pending(self) -> tuple[int, ...]:
        """The part of its share that it has not computed yet."""
        return tuple(microbatch for microbatch in self.share if microbatch not in self.held)

    @property
    def may_commit(self) -> bool:
        """Whether the result is complete here and every member, idle ones included, acknowledged its own."""
        return self.settled and self.result == self.generation and self.acknowledged_by >= frozenset(self.members)


def begin(ledger: Ledger, num_microbatches: int) -> Ledger:
    """Begin the next step in an undisturbed generation."""
    if ledger.owners:
        return ledger
    able = able_replicas(ledger.layout, ledger.members, ledger.idle)
    slowness = ledger.layout.by_replica(able, ledger.pace.slowness(range(len(ledger.members))))
    owners = tuple(able[owner] for owner in plan(num_microbatches, len(able), slowness))
    return replace(ledger, owners=owners)


def hold(ledger: Ledger, microbatch: int) -> Ledger:
    """Record that the gradient of ``microbatch`` is in this worker's buffers.

    In a replica of several workers it is a leaf until the next beat: they may not all have it.
    """
    leaf = microbatch if ledger.layout.replica_size > 1 else None
    return replace(ledger, held=ledger.held | {microbatch}, leaf=leaf)


def confirmed(ledger: Ledger) -> Ledger:
    """Record a beat by which every position of the replica computed its last microbatch whole."""
    return replace(ledger, leaf=None)


def let_go(ledger: Ledger, computed: Collection[int] = ()) -> Ledger:
    """Release what was held or ``computed`` of the step in flight: it is computed again."""
    return replace(ledger, held=frozenset(), again=ledger.held | frozenset(computed))


def complete(ledger: Ledger) -> Ledger:
    """Record that all chunks, buffers and the word of the step in flight are here; acknowledge it to every member."""
    return replace(ledger, result=ledger.generation, acknowledged_by=ledger.acknowledged_by | {ledger.worker_id})


def acknowledged(ledger: Ledger, by: str, generation: int, step: int) -> Ledger:
    """Record that ``by`` has the result of ``step`` under ``generation``; ignore all but the current attempt."""
    if generation != ledger.generation or step != ledger.step or not ledger.settled:
        return ledger
    return replace(ledger, acknowledged_by=ledger.acknowledged_by | {by})


def acknowledged_by_all(ledger: Ledger) -> Ledger:
    """Record that every member has the result of the step in flight under the current generation."""
    return replace(ledger, acknowledged_by=frozenset(ledger.members))


def commit(ledger: Ledger, able: Collection[str] | None = None, pace: MemberSpeeds | None = None) -> Ledger:
    """Commit the step in flight; release its gradients.

    The worker has the state from here on, though its update is yet to run: what it cannot compute without its replica, its twins
    recorded. ``able``: members that can compute, by its combined word; ``pace``: their speeds after it.
    """
    if ledger.result is None:
        raise ProtocolViolation(f"worker {ledger.worker_id} has no result to commit")
    idle = ledger.idle if not able else frozenset(ledger.members) - frozenset(able)
    return replace(_before(ledger, ledger.step + 1), idle=idle, pace=ledger.pace if pace is None else pace)


def _before(ledger: Ledger, step: int) -> Ledger:
    """Return the ledger before ``step`` begins."""
    return replace(
        ledger,
        step=step,
        owners=(),
        held=frozenset(),
        again=frozenset(),
        result=None,
        acknowledged_by=frozenset(),
        calls=0,
        call_result=None,
        call="",
    )


def adopt(ledger: Ledger) -> Ledger:
    """Record that a joiner's state is here: with its queued results, it is as far as the others."""
    return replace(ledger, has_state=True)


def keeps_pace(ledger: Ledger) -> Ledger:
    """Record that a joiner caught up and warmed up: it can be given microbatches."""
    return replace(ledger, can_compute=True)


def calling(ledger: Ledger, call: str) -> Ledger:
    """Record that the script makes a collective call."""
    return replace(ledger, call=call)


def called(ledger: Ledger) -> Ledger:
    """Record that all parts of the collective call are here."""
    return replace(ledger, call_result=ledger.generation)


def verified(ledger: Ledger, branch: int, step: int) -> Ledger:
    """Record that the checkpoint to go back to is here and verified."""
    return replace(ledger, rewind_to=(branch, step))


def discarded(ledger: Ledger) -> Ledger:
    """Drop that checkpoint: a member cannot use it."""
    return replace(ledger, rewind_to=None)


def rewound(ledger: Ledger) -> Ledger:
    """Go back to that checkpoint, which every member has. The step in flight is dropped."""
    if ledger.rewind_to is None:
        raise ProtocolViolation(f"worker {ledger.worker_id} has no checkpoint to go back to")
    branch, step = ledger.rewind_to
    return replace(_before(ledger, step), branch=branch, rewinds=ledger.rewinds + 1, rewind_to=None)


def returned(ledger: Ledger) -> Ledger:
    """Record that the collective call returns to the script."""
    return replace(ledger, calls=ledger.calls + 1, call_result=None, call="")


def loop_ended(ledger: Ledger) -> Ledger:
    """Record that every member reached the end of the training loop."""
    return replace(ledger, over=True)


def loop_begun(ledger: Ledger) -> Ledger:
    """Record that the script begins another training loop; its steps are numbered on from the last one."""
    return replace(ledger, loop=ledger.loop + 1, over=False, first_step=ledger.step)
