"""Collective calls before a worker takes part in a loop, such as ``job.once("download", fn)``.

The first workers of a job enter their generation for these calls before the first loop. A later worker, which replaces a lost
one, reaches the calls after the others, also those after loops that the job has ended: it asks a member for the result.
"""

from __future__ import annotations

import logging
import time

import msgspec

from craft.protocol.errors import SnapshotError, Unreachable
from craft.protocol.values.activity import Phase
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import recall
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.ft_calls import CallPlace, FaultTolerantCalls, taking_part
from craft.worker.membership.participant import Participant
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.reporter import Reporter

logger = logging.getLogger(__name__)

_SILENCE_S = 600.0
_AGAIN_S = 0.1


class PreLoopCalls:
    """Makes calls outside loops, or fetches their results. Owned by the main thread."""

    def __init__(
        self,
        participant: Participant,
        membership: MembershipClient,
        reporter: Reporter,
        activity: ActivityPage,
        donor: Donor | None,
        key: bytes,
        late: bool,
    ) -> None:
        """``late``: this worker joined a running job."""
        self._participant = participant
        self._membership = membership
        self._reporter = reporter
        self._activity = activity
        self._donor = donor
        self._key = key
        self._late = late
        self._calls = FaultTolerantCalls(participant, donor, key, self._meet)
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
            self._donor.keep(name, found)
        return msgspec.msgpack.decode(found, type=list[bytes])

    def _ask(self, name: str) -> bytes | None:
        generation = self._membership.generation

        def is_outdated() -> bool:
            return self._membership.generation != generation

        for member in generation.members if generation is not None else ():
            try:
                return recall((member.address, member.state_port), name, self._key, is_outdated, _SILENCE_S)
            except (SnapshotError, Unreachable) as error:
                logger.info("the result of call %s did not come from %s: %s", name, member.worker_id, error)
        return None
