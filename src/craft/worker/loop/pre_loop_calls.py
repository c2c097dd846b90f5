"""Collective calls before a worker takes part in a loop, such as ``job.once("download", fn)``.

The first workers of a job enter their generation for these calls before the first loop. A later worker, which replaces a lost
one, reaches the calls after the others, also those after loops that the job has ended: it asks a member for the result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from craft.protocol.values.activity import Phase
from craft.snapshots.transfer.donor import Donor
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.ft_calls import CallPlace, FaultTolerantCalls, ask_member, taking_part
from craft.worker.membership.participant import Participant
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.reporter import Reporter

_AGAIN_S = 0.1


@dataclass(eq=False)
class PreLoopCalls:
    """Makes calls outside loops, or fetches their results. Owned by the main thread."""

    _participant: Participant
    _membership: MembershipClient
    _reporter: Reporter
    _activity: ActivityPage
    _donor: Donor | None
    _key: bytes
    _late: bool
    """Whether this worker joined a running job."""

    def __post_init__(self) -> None:
        self._calls = FaultTolerantCalls(self._participant, self._donor, self._key, self._meet)
        self._recalled = ("", 0)
        """A place, and how many results of its calls were taken from others."""

    @property
    def _place(self) -> CallPlace:
        loops = self._participant.loops
        return CallPlace(name=f"end{loops}" if loops else "start", step=self._participant.step, kept=True)

    @property
    def behind(self) -> bool:
        """Whether this worker takes the results of calls that the others made before it joined."""
        return self._late and not self._participant.ledger.generation and self._membership.generation is not None

    def is_first(self) -> bool:
        """Enter the generation; return whether this worker is the first participant in these calls."""
        self._enter()
        if self.behind:
            return False
        _, position = taking_part(self._participant)
        return position == 0

    def call(self, name: str, data: bytes) -> list[bytes]:
        """Return the bytes of all workers that take part in the call."""
        self._enter()
        if self.behind:
            return self._recall()
        self._activity.now(Phase.CALLING, 0)
        try:
            generation = self._participant.ledger.generation
            return self._calls.gather(name, data, self._place, generation, False, lambda: False)
        finally:
            self._activity.now(Phase.STARTING)

    def _enter(self) -> None:
        """Enter the first generation, unless the others are already running."""
        if self._participant.ledger.generation:
            return
        if self._late:
            # When the whole job restarts there is no generation yet, and these workers are its first.
            self._membership.wait_others()
        if not self.behind:
            self._activity.now(Phase.JOINING, 0)
            self._reporter.report(joined=True)
            self._meet()
            self._activity.now(Phase.STARTING)

    def _meet(self) -> None:
        """Enter the newest generation; steps are planned when the loop begins."""
        settlement = self._participant.regroup(lambda _: 0)
        self._reporter.settled(settlement, self._participant.ledger.generation)

    def _recall(self) -> list[bytes]:
        """Take the result of this worker's next call from the others."""
        place = self._place.name
        number = self._recalled[1] if self._recalled[0] == place else 0
        self._recalled = (place, number + 1)
        self._participant.recalled = True
        return self.result_of(f"{place}/{number}")

    def result_of(self, name: str) -> list[bytes]:
        """Ask the members of the current generation in turn for a call's result."""
        with self._activity.paused("waits for what the others did here"):
            while (found := self._ask(name)) is None:
                time.sleep(_AGAIN_S)
        if self._donor is not None:
            self._donor.keep(name, msgspec.msgpack.encode(found))
        return found

    def _ask(self, name: str) -> list[bytes] | None:
        generation = self._membership.generation
        members = generation.members if generation is not None else ()
        answers = (
            ask_member(each, name, self._key, lambda: self._membership.generation != generation) for each in members
        )
        return next((found for found in answers if found is not None), None)
