"""This worker's place in the history: its ledger, and how it follows from one generation into the next.

Enters: directives, by way of the meeting; the outcome of exchanges. Leaves: settlements. Called by the main thread only,
or, while a joiner catches up, by the thread that follows the exchange in its stead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from craft.decide import ledger as books
from craft.decide import stragglers
from craft.decide.ledger import Ledger
from craft.decide.settle import LossAnswer, settle
from craft.decide.stragglers import StragglerSettings
from craft.groups.group import Group
from craft.protocol.entries import Entered, Moments
from craft.protocol.errors import ConfigError, GroupError, StateLost
from craft.protocol.membership import DROPPED, Claim, Generation, Settlement
from craft.protocol.word import Combined
from craft.worker.devices import DIFFERENT_DEVICES
from craft.worker.gather import gather
from craft.worker.meeting import Meeting
from craft.worker.points import reach

logger = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What each member tells the others when a generation begins."""

    claim: Claim
    trainable: bytes
    """Bitmap over the parameters: which of them get gradients now. A joiner, whose own script is not there yet, follows it."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


def decode_entry(data: bytes) -> Entry:
    """Return the entry in ``data``; another member may have come with something else."""
    try:
        return _decode(data)
    except msgspec.DecodeError:
        raise ConfigError(DIFFERENT_DEVICES) from None


class Commitments:
    """Owns the ledger."""

    def __init__(
        self,
        worker_id: str,
        meeting: Meeting,
        on_loss: LossAnswer,
        on_state_lost: Callable[[int], None],
        straggling: StragglerSettings | None,
    ) -> None:
        """``on_state_lost(generation)`` is called before StateLost is raised, whoever catches it.

        ``straggling``: when a member is taken for slow; None: never.
        """
        self.ledger = Ledger(worker_id=worker_id)
        self.generation: Generation | None = None
        self.group: Group | None = None
        self.started = False
        """Whether the members are known to have begun from the same state."""
        self.lost: tuple[str, ...] = ()
        """Members of the generation before that are not in this one."""
        self.trainable: Callable[[], bytes] = bytes
        """Gives what this worker tells of its parameters."""
        self.trained = b""
        """After a generation was entered without state: what the others told of theirs."""
        self.entered: Entered | None = None
        """How this worker came into the generation that it acts under."""
        self.prepared: Callable[[], bool] = lambda: True
        """Tells whether this worker has room for what it is to give to those who join."""
        self.record: Callable[[Entered], None] = lambda _: None
        """Writes that down, for every generation."""
        self._meeting = meeting
        self._on_loss = on_loss
        self._on_state_lost = on_state_lost
        self._straggling = straggling

    @property
    def step(self) -> int:
        """The step in flight, which is also the number of committed steps."""
        return self.ledger.level

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where the members are, in the order of their ranks."""
        return self.generation.hosts if self.generation is not None else ()

    @property
    def slots(self) -> int:
        """Places in the job's layout."""
        return self._meeting.slots

    @property
    def moved(self) -> bool:
        """Whether there is a newer generation to enter."""
        return self._meeting.newer(self.ledger.generation)

    @property
    def ready(self) -> int:
        """The newest generation for which this worker is ready. Nobody waits at a step boundary for memory to be there."""
        return self._meeting.ready if self.prepared() else self.ledger.generation

    def agree(self, combined: Combined) -> bool:
        """Whether ``combined``, the word of the step just committed, says that all enter a prepared generation now."""
        if combined.ready <= self.ledger.generation:
            return False
        self._meeting.agree(combined.ready)
        return self.moved

    def check_leaving(self, combined: Combined | None) -> None:
        """Raise Left if ``combined``, of a result in hand, says that all go on without this worker."""
        if combined is not None:
            self._meeting.check_leaving(combined.ready)

    def broke(self, error: Exception) -> None:
        """Say that the group of the generation it acts under broke."""
        self._meeting.broke(self.ledger.generation, error)

    def await_move(self) -> None:
        """The group is of no use any more: wait for a newer generation."""
        self._meeting.wait_newer(self.ledger.generation)

    def regroup(self, size_of: Callable[[int], int]) -> Settlement:
        """Enter the newest generation and settle with its members what becomes of the step in flight.

        A failure meanwhile leads to a newer generation, and to another round.
        """
        while True:
            generation, group, moments = self._meeting.enter()
            came = time.time()
            reach("entering", self.step)
            if not self.ledger.generation and (restoration := self._meeting.restoration) is not None:
                self.ledger = replace(self.ledger, branch=restoration.branch)
            self.ledger = books.enter(self.ledger, generation)
            claim = replace(books.claim(self.ledger), started=self.started)
            try:
                parts = gather(group, _encode(Entry(claim, self.trainable())))
            except GroupError as error:
                logger.info("generation %d broke while it settled: %s", generation.number, error)
                self._meeting.broke(generation.number, error)
                self.await_move()
                continue
            reach("claimed", self.step)
            entries = [decode_entry(part) for part in parts]
            claims = [entry.claim for entry in entries]
            self.started = any(other.started for other in claims)
            try:
                settlement = settle(claims, size_of, self._on_loss)
            except StateLost:
                self._on_state_lost(generation.number)
                raise
            self.ledger = books.settled(self.ledger, settlement)
            if not self.ledger.whole:
                self.trained = next(entry.trainable for entry in entries if entry.claim.committed is not None)
            before = self.generation.worker_ids if self.generation is not None else ()
            self.lost = tuple(worker_id for worker_id in before if worker_id not in generation.worker_ids)
            self.generation, self.group = generation, group
            self._meeting.settled(generation.number)
            self._write_down(generation, claims, settlement, moments, came)
            return settlement

    def _write_down(
        self, generation: Generation, claims: Sequence[Claim], settlement: Settlement, moments: Moments, came: float
    ) -> None:
        goes_on = [claim for claim in claims if claim.committed == settlement.level]
        self.entered = Entered(
            generation=generation.number,
            time=time.time(),
            told=moments.told,
            aborted=moments.aborted,
            met=moments.met,
            entered=came,
            agreed=moments.aborted is None,
            members=generation.worker_ids,
            lost=self.lost,
            joiners=settlement.joiners,
            idle=settlement.idle,
            step=settlement.level,
            commits=self.ledger.worker_id in settlement.commits,
            retried=any(claim.held or claim.again for claim in goes_on),
            given=settlement.given,
            mine=tuple(each for each in settlement.given if settlement.owners[each] == self.ledger.rank),
            dropped=tuple(index for index, owner in enumerate(settlement.owners) if owner == DROPPED),
            again=tuple(sorted({microbatch for claim in goes_on for microbatch in claim.again})),
        )
        self.record(self.entered)

    def completed(self) -> None:
        """The whole result of the step in flight is here."""
        self.ledger = books.complete(self.ledger)

    def all_acknowledged(self, combined: Combined) -> None:
        """Every member of the generation has acknowledged it: commit."""
        for worker_id in self.ledger.members:
            self.ledger = books.acknowledged(self.ledger, worker_id, self.ledger.generation, self.step)
        assert self.ledger.may_commit, self.ledger
        able = [self.ledger.members[rank] for rank in combined.able]
        pace = None
        if self._straggling is not None:
            pace = stragglers.observed(self.ledger.pace, combined.busy_us, self._straggling)
        self.ledger = books.commit(self.ledger, able, pace)
