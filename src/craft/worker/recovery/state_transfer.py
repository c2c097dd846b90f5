"""Give this worker's state to joiners, and take the others' state when this worker joins.

The main thread calls it around each step. Only the copy of this worker's stripe, at a step boundary, delays a step; the donor
serves it on separate threads.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from craft.decide.step.replicas import layout_of
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Generation, Settlement
from craft.snapshots.state.reserved_memory import can_wait_there
from craft.snapshots.state.serialized import carried_bytes, load
from craft.snapshots.store.background import num_lanes
from craft.snapshots.transfer.fetch import Fetched, fetch
from craft.telemetry.fault_points import reach
from craft.worker.checkpoint.lifecycle import CheckpointLifecycle
from craft.worker.state.loop_context import LoopContext
from craft.worker.state.metadata import Attached, TrainingProgress
from craft.worker.state.preflight import compare

logger = logging.getLogger(__name__)

_STRIPE_SLACK = 1 << 16
"""Stripes are not quite equal."""
_SILENCE_S = 60.0
"""A donor stages at its next step boundary, and a step may be long."""


class StateTransfer:
    """Owned by the main thread, except ``fetch``; during catch-up, the follower's thread calls ``settled``."""

    def __init__(self, context: LoopContext, lifecycle: CheckpointLifecycle) -> None:
        self._reserve = context.reserve
        self._donor = context.donor
        self._key = context.settings.state_key_bytes
        self._participant = context.participant
        self._modules = context.modules
        self._registered = context.registered
        self._lifecycle = lifecycle
        self._due: Settlement | None = None
        """The settlement whose joiners wait for a stripe that is not copied yet."""
        self._serving = False
        self._state_bytes = 0
        """Size of the state, once it is known."""
        self._early = False
        """Whether to reserve memory for a stripe before any loss."""
        self._helping = False
        """Whether some member is not current yet."""

    def can_serve(self) -> bool:
        """Return whether memory is ready for this worker's stripe."""
        return self._donor is None or self._donor.prepared

    def settled(self, settlement: Settlement) -> None:
        """Begin a generation; its joiners need the state as of its first step."""
        self._release()
        self._helping = bool(settlement.idle)
        if not self._helping:
            self._forget()
        self._due = settlement if settlement.joiners else None
        members = len(self._participant.ledger.members)
        if self._donor is not None and self._state_bytes and members < self._participant.slots:
            # A joiner will need a stripe, and the first touch of memory would cost a step more than the copy does.
            self._donor.reserve(self._stripe_bytes(members))

    def _stripe_bytes(self, donors: int) -> int:
        """Return the memory for the largest stripe among this many donors."""
        return -(-self._state_bytes // donors) + _STRIPE_SLACK

    @property
    def is_asked(self) -> bool:
        """Whether joiners wait for a copy of the state from this worker."""
        return self._due is not None

    def give(self) -> None:
        """Stage this worker's stripe for joiners, if any wait; the state is that of the last commit."""
        settlement, generation = self._due, self._participant.generation
        if settlement is None or generation is None or self._donor is None:
            return
        self._due = None
        ledger = self._participant.ledger
        worker_id, position = ledger.worker_id, ledger.layout.position_of(ledger.rank)
        donors = donors_of(generation, settlement, position)
        if worker_id in donors:
            began = time.monotonic()
            state = self._lifecycle.state()
            self._donor.stage(generation.name, settlement.step, state, donors.index(worker_id), len(donors))
            self._serving = True
            took_s = time.monotonic() - began
            logger.info("staged the state as of step %d for those who join, in %.3f s", settlement.step, took_s)
            reach("staged", settlement.step)

    def measure(self) -> int:
        """Measure the state; return how much memory a joiner should set aside."""
        header = self._lifecycle.state().header
        self._state_bytes = header.total_bytes
        # Pinning memory delays the device longer than touching it, and a step during a join has enough to do.
        self._early = bool(header.on_device)
        return carried_bytes(header)

    def _release(self) -> None:
        """Release the staged copy, which no joiner needs any more."""
        if self._serving and self._donor is not None:
            self._donor.release()
        self._serving = False

    def _forget(self) -> None:
        """Drop the kept call results, which no joiner needs any more."""
        if self._donor is not None:
            self._donor.forget()

    def committed(self, *, computed: bool) -> None:
        """Update after a commit; ``computed``: whether this worker computed some of the step.

        Once every member is current, none needs past state or results.
        """
        if computed and self._early and self._donor is not None:
            self._early = False
            size = self._stripe_bytes(max(1, self._participant.slots - 1))
            if can_wait_there(size):
                self._donor.reserve(size)
        if self._helping and not self._participant.ledger.idle:
            self._helping = False
            self._release()
            self._forget()

    def fetch(self, generation: Generation, donors: tuple[str, ...], cancelled: threading.Event) -> Fetched:
        """Fetch the whole state, a stripe from each donor; blocks, so call it on a separate thread."""
        places = [(member.address, member.state_port) for member in generation.members if member.worker_id in donors]
        return fetch(
            places,
            generation.name,
            self._key,
            cancelled=cancelled,
            limit_s=_SILENCE_S,
            modules=self._modules,
            reserve=self._reserve,
            lanes=num_lanes(len(places)),
        )

    def needs_nothing(self) -> None:
        """Release the reserved memory: this worker begins with the others and takes no state."""
        if self._reserve is not None:
            self._reserve.release()
            self._reserve = None

    def load(self, fetched: Fetched) -> TrainingProgress:
        """Load a fetched state into this worker's objects; it is then bit for bit that of the donors."""
        theirs = msgspec.json.decode(fetched.header.conditions, type=Attached)
        problem = compare(
            "the job", theirs.conditions, self._participant.ledger.worker_id, self._lifecycle.attached.conditions
        )
        if problem is not None:
            raise ConfigError(problem)
        if theirs.progress.spoiled:
            raise ConfigError(
                "code after the training loop changed the training state before this worker could take it: that code cannot be"
                " run again from where it began. Let job.once(name, fn) do such work: then the next worker does it"
            )
        if theirs.modes is not None:
            theirs.modes.put(self._modules, self._registered)
        load(fetched.header, fetched.tensors, self._modules, self._registered)
        self._reserve = None
        return theirs.progress


def donors_of(generation: Generation, settlement: Settlement, position: int) -> tuple[str, ...]:
    """Return the donors in stripe order: every current member that has the state of ``position``."""
    without = frozenset((*settlement.idle, *settlement.joiners))
    twins = layout_of(generation).column(position, len(generation.members))
    found = (generation.members[rank].worker_id for rank in twins)
    return tuple(worker_id for worker_id in found if worker_id not in without)
