"""What a simulated worker does in a generation: claims, settles, computes, exchanges and commits, by the real rules.

Every decision is a function of ``craft.decide``: ``ledger`` and ``settle``. In the place of tensors there is one digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from craft.decide.step import ledger as ledgers
from craft.decide.step import regroup
from craft.decide.step.ledger import Ledger
from craft.decide.step.settle import settle
from craft.protocol.errors import StateLost
from craft.protocol.events import CheckpointRestored, CheckpointWritten
from craft.protocol.membership import Claim
from craft.protocol.values.activity import Phase

from .groups import Group
from .history import MICROBATCHES, trained
from .messages import Ack, Claimed, Done, Message, Share, Wrote

if TYPE_CHECKING:
    from .workers import Worker

_KEPT_NOTES = 8


class Training:
    """Owned by one worker; its calls come from the worker's process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._history = worker.world.history
        self._chance = worker.world.chance
        self.ledger = Ledger(worker_id=worker.worker_id)
        self.digest = "initial"
        self.has_entered = False
        self.commits = 0
        self.breaks_left = 0
        """So many of its next groups break right after they settled: a fault."""
        self.hangs = False
        """It computes, and never comes to an end: a fault."""
        self._group: Group | None = None
        self._is_broken = False
        self._hand: frozenset[int] = frozenset()
        self._word: tuple[Share, ...] = ()
        self._queued: list[tuple[int, frozenset[int]]] = []
        """Results of steps since the settlement, while the state is on its way."""
        self._claims: dict[str, dict[str, Claim]] = {}
        self._shares: dict[tuple[str, int, int], dict[str, Share]] = {}
        self._acks: dict[tuple[str, int, int], set[str]] = {}
        self._wrote: dict[tuple[str, int, int], set[str]] = {}
        self._done: dict[str, set[str]] = {}
        self._saving: tuple[int, int] | None = None
        """A checkpoint that this worker waits for before it leaves: of a job that makes room."""
        self._wishes_seen = 0
        self._over = False

    # Into a generation

    def enter(self, group: Group) -> None:
        """The group of a newer generation is open: promise, then claim."""
        generation = group.generation
        if generation.number <= self.ledger.generation:
            return
        if not self.has_entered:
            self._begin()
        self.has_entered = True
        self._group, self._is_broken = group, False
        self.ledger = regroup.enter(self.ledger, generation)
        claim = regroup.claim(self.ledger)
        self._worker.phase(Phase.JOINING)
        group.send(self._worker, Claimed(claim))
        self.take(group, self._worker.worker_id, Claimed(claim))

    def _begin(self) -> None:
        """The first time: from the checkpoint with which the job began again, if it did."""
        again = self._worker.restoration
        if again is None:
            return
        step, self.digest = self._history.begin(self._worker.worker_id, again.branch, again.checkpoint)
        self.ledger = replace(self.ledger, branch=again.branch, step=step)

    def take(self, group: Group, sender: str, message: Message) -> None:
        """Something of a member arrives: of the generation at hand, or of one that is entered next."""
        name = group.generation.name
        if isinstance(message, Claimed):
            self._claims.setdefault(name, {})[sender] = message.claim
        elif isinstance(message, Share):
            self._shares.setdefault((name, message.branch, message.step), {})[sender] = message
        elif isinstance(message, Ack):
            self._acks.setdefault((name, message.branch, message.step), set()).add(sender)
        elif isinstance(message, Wrote):
            self._wrote.setdefault((name, message.branch, message.step), set()).add(sender)
            self._publish((name, message.branch, message.step))
        else:
            self._done.setdefault(name, set()).add(sender)
        if group is self._group and not self._is_broken:
            self._go_on()

    def _go_on(self) -> None:
        """Whatever can be done with what has arrived."""
        if not self.ledger.settled:
            self._settle()
        elif self._over:
            self._finish_loop()
        else:
            self._complete()
            self._commit()

    def _settle(self) -> None:
        group = self._group
        assert group is not None
        arrived = self._claims[group.generation.name]
        if len(arrived) < len(group.generation.members):
            return
        claims = [arrived[worker_id] for worker_id in group.generation.worker_ids]
        try:
            settlement = settle(claims, self._size_of)
        except StateLost:
            self._worker.say(state_gone=group.generation.number)
            self._is_broken = True
            return
        if self._worker.worker_id in settlement.commits:
            self._commit_hand()
        self.ledger = regroup.settled(self.ledger, settlement)
        self._over = self._over or settlement.over
        self._settled(group)

    def _settled(self, group: Group) -> None:
        worker, ledger = self._worker, self.ledger
        first = not worker.is_inside
        worker.is_inside = True
        if worker.leaving <= group.generation.number:
            worker.leaving = 0
        for old in worker.left_behind:
            old.leave(worker)
        worker.left_behind = []
        notes = worker.report.notes
        if first and ledger.has_state and worker.restoration is not None and worker.restoration.checkpoint is not None:
            again = worker.restoration
            note = CheckpointRestored(name=again.checkpoint or "", branch=again.branch, step=again.step, url="store")
            notes = (*notes, note)[-_KEPT_NOTES:]
        worker.say(
            generation=group.generation.number,
            broken=None,
            step=ledger.step if ledger.has_state else worker.report.step,
            progress=(ledger.branch, ledger.step, 0),
            behind=not ledger.can_compute,
            total_steps=self._history.steps,
            microbatches=MICROBATCHES,
            notes=notes,
        )
        if self.breaks_left:
            self.breaks_left -= 1
            worker.break_off(group)
            return
        self._queued = []
        if not ledger.has_state:
            worker.process.later(self._chance.uniform(0.05, 0.4), self._adopt, group)
        self._begin_step()
        self.directed()

    def _adopt(self, group: Group) -> None:
        """The state arrives from a donor of the same generation; with the results queued since, this one is level."""
        if group is not self._group or self._is_broken or self.ledger.has_state:
            return
        self.ledger = ledgers.keeps_pace(ledgers.adopt(self.ledger))
        first = self._queued[0][0] if self._queued else self.ledger.step
        self.digest = self._history.committed[self.ledger.branch, first]
        for step, hand in self._queued:
            self._count(step, hand)
        self._worker.say(behind=False, step=self.ledger.step)
        self._go_on()

    def broke(self, group: Group) -> None:
        if group is not self._group:
            return
        self._is_broken = True
        if self.ledger.result is not None and self._worker.leaving == min(share.ready for share in self._word):
            # All were ready to go on without it, and some may have.
            self._worker.leave()

    # Steps

    def _size_of(self, step: int) -> int:
        return MICROBATCHES if step < self._history.steps else 0

    def _begin_step(self) -> None:
        if self.ledger.step >= self._history.steps or self._over:
            self._end_loop()
            return
        self.ledger = ledgers.begin(self.ledger, self._size_of(self.ledger.step))
        self._compute(self._group)

    def _compute(self, group: Group | None) -> None:
        if group is not self._group or not self.ledger.settled:
            return
        pending = self.ledger.pending
        if not pending:
            self._share()
            return
        self._worker.phase(Phase.COMPUTING, pending[0])
        if not self.hangs:
            delay_s = self._worker.world.plan.microbatch_s * self._chance.uniform(0.8, 1.2)
            self._worker.process.later(delay_s, self._computed, group, self.ledger.step, pending[0])

    def _computed(self, group: Group, step: int, microbatch: int) -> None:
        if group is not self._group or not self.ledger.settled or self.hangs:
            return
        if self.ledger.step == step and microbatch in self.ledger.pending:
            self.ledger = ledgers.hold(self.ledger, microbatch)
            self._compute(group)

    def _share(self) -> None:
        group, ledger, directive = self._group, self.ledger, self._worker.directive
        assert group is not None
        self._worker.phase(Phase.EXCHANGING)
        every = self._worker.world.plan.checkpoint_every
        wished = max((wish.number for wish in directive.wishes), default=0)
        share = Share(
            branch=ledger.branch,
            step=ledger.step,
            owners=ledger.owners,
            ready=self._worker.ready if ledger.has_state else 0,
            able=ledger.can_compute,
            ends=directive.winding_down is not None,
            makes_room=directive.preempting is not None,
            saves=wished > self._wishes_seen or bool(every and (ledger.step + 1) % every == 0),
        )
        self._wishes_seen = wished
        if not self._is_broken:
            group.send(self._worker, share)
            self.take(group, self._worker.worker_id, share)

    def _complete(self) -> None:
        group, ledger = self._group, self.ledger
        assert group is not None
        if ledger.result is not None or not ledger.owners:
            return
        shares = self._shares.get((group.generation.name, ledger.branch, ledger.step), {})
        if len(shares) < len(ledger.members):
            return
        if any(share.owners != ledger.owners for share in shares.values()):
            self._worker.world.violated(f"P2: members of generation {ledger.generation} do not agree on who owns what")
        self._hand = frozenset(range(MICROBATCHES))
        self._word = tuple(shares[worker_id] for worker_id in ledger.members)
        self.ledger = ledgers.complete(ledger)
        ack = Ack(ledger.branch, ledger.step)
        group.send(self._worker, ack)
        self._acks.setdefault((group.generation.name, *ack), set()).add(self._worker.worker_id)

    def _commit(self) -> None:
        group, ledger = self._group, self.ledger
        assert group is not None
        if ledger.result is None:
            return
        for sender in self._acks.get((group.generation.name, ledger.branch, ledger.step), ()):
            ledger = ledgers.acknowledged(ledger, sender, group.generation.number, ledger.step)
        self.ledger = ledger
        if not ledger.may_commit:
            return
        self._commit_hand()
        able = [member for member, share in zip(ledger.members, self._word, strict=True) if share.able]
        self.ledger = ledgers.commit(self.ledger, able)
        self._at_boundary(group)

    def _commit_hand(self) -> None:
        """Count the step in flight; a joiner without the state queues its result."""
        if self.ledger.has_state:
            self._count(self.ledger.step, self._hand)
        else:
            self._queued.append((self.ledger.step, self._hand))

    def _count(self, step: int, hand: frozenset[int]) -> None:
        self.digest = trained(self.digest, step, hand)
        now = self._worker.process.loop.now
        self._history.commit(self._worker.worker_id, self.ledger.branch, step + 1, self.digest, now)
        self.commits += 1

    def _at_boundary(self, group: Group) -> None:
        worker, word = self._worker, self._word
        worker.phase(Phase.UPDATING)
        if self.ledger.has_state:
            worker.say(step=self.ledger.step)
        agreed = min(share.ready for share in word)
        if any(share.makes_room for share in word):
            self._make_room(group)
            return
        if any(share.saves for share in word) and self.ledger.has_state:
            self._save(group)
        self._over = self.ledger.step >= self._history.steps or any(share.ends for share in word)
        if self._over:
            self.ledger = ledgers.loop_ended(self.ledger)
        if not self._over and agreed > group.generation.number:
            if worker.leaving == agreed:
                worker.leave()
                return
            if worker.upcoming is not None and worker.upcoming.generation.number == agreed:
                worker.follow()
                return
        self._begin_step()

    # Checkpoints

    def _save(self, group: Group) -> None:
        """Write this worker's part; the first member publishes the whole when all have written theirs."""
        if not self._worker.world.plan.checkpoints:
            return
        place = self.ledger.branch, self.ledger.step
        self._worker.process.later(self._chance.uniform(0.02, 0.1), self._written, group, place, self.digest)

    def _written(self, group: Group, place: tuple[int, int], digest: str) -> None:
        self._worker.world.parts[place] = digest
        wrote = Wrote(*place)
        group.send(self._worker, wrote)
        self.take(group, self._worker.worker_id, wrote)

    def _publish(self, key: tuple[str, int, int]) -> None:
        group = self._group
        if group is None or group.generation.name != key[0] or self.ledger.rank != 0 or not self.ledger.has_state:
            return
        able = [each for each in self.ledger.members if each not in self.ledger.idle]
        if not self._wrote[key] >= set(able):
            return
        _, branch, step = key
        name = f"{branch}-{step}"
        if name not in self._history.saved:
            self._history.saved[name] = (branch, step, self._worker.world.parts[branch, step])
            note = CheckpointWritten(name=name, branch=branch, step=step, url="store")
            self._worker.say(notes=(*self._worker.report.notes, note)[-_KEPT_NOTES:])

    def _make_room(self, group: Group) -> None:
        self._saving = self.ledger.branch, self.ledger.step
        if self.ledger.has_state:
            self._save(group)
        self.directed()

    # The end

    def directed(self) -> None:
        """A directive came that may be waited for."""
        worker, directive = self._worker, self._worker.directive
        if self._saving is not None and directive.saved is not None and directive.saved >= self._saving:
            worker.leave()
        elif (
            worker.report.script_ended and directive.finishing == self.ledger.generation and not worker.report.complete
        ):
            worker.say(complete=True, step=self.ledger.step, digest=self.digest)
            worker.process.later(0.01, worker.exit, 0)

    def _end_loop(self) -> None:
        """All steps are committed here: meet the others at the end of the loop."""
        group = self._group
        assert group is not None
        self._over = True
        self._worker.phase(Phase.ENDING)
        if self.ledger.has_state and not self._is_broken:
            done = Done(self.ledger.step)
            group.send(self._worker, done)
            self._done.setdefault(group.generation.name, set()).add(self._worker.worker_id)
            self._finish_loop()

    def _finish_loop(self) -> None:
        group, worker = self._group, self._worker
        assert group is not None
        done = self._done.setdefault(group.generation.name, set())
        if self.ledger.has_state and worker.worker_id not in done:
            self._end_loop()
        elif len(done) == len(group.generation.members) and not worker.report.after_loop:
            worker.say(after_loop=True, step=self.ledger.step)
            worker.process.later(self._chance.uniform(0.02, 0.3), self._end_script)

    def _end_script(self) -> None:
        self._worker.say(script_ended=True)
        self.directed()
