"""Collective calls between the steps of a training loop, and after it."""

from __future__ import annotations

from typing import Protocol

from craft.protocol.values.activity import Phase
from craft.worker.loop.inner_loop.microbatch import CurrentStep
from craft.worker.loop.joining import Joining
from craft.worker.loop.loop_end import LoopEnd, after_loop, meeting_at_end
from craft.worker.loop.pre_loop_calls import PreLoopCalls
from craft.worker.loop.step_result import StepResult
from craft.worker.membership.ft_calls import CallPlace, FaultTolerantCalls
from craft.worker.membership.participant import Participant
from craft.worker.report.activity_page import ActivityPage


class CallingLoop(Protocol):
    """The loop in which calls are made."""

    current: CurrentStep | None
    over: bool
    loop_end: LoopEnd
    step_result: StepResult
    joining: Joining

    @property
    def applied(self) -> int: ...

    @property
    def behind(self) -> bool: ...


class LoopCalls:
    """Makes the collective calls of one loop. Owned by the main thread."""

    def __init__(
        self, loop: CallingLoop, participant: Participant, calls: FaultTolerantCalls, activity: ActivityPage
    ) -> None:
        self._loop = loop
        self._participant = participant
        self._calls = calls
        self._activity = activity
        self.passed: PreLoopCalls | None = None
        """On a worker that joined after the job ended this loop: makes its calls after the loop."""

    def left_alone(self) -> bool:
        """Return whether this worker, which is behind, makes calls alone because no current worker is left."""
        return self.passed is None and self._calls.left_alone(self._loop.joining.is_followed)

    def tell_joiners(self) -> None:
        """Keep the results of calls for joiners."""
        self._calls.tell_joiners()

    def call(self, name: str, data: bytes) -> list[bytes] | None:
        """Return the bytes of all workers in the call; None if the script may not call here."""
        if self.passed is not None:
            return self.passed.call(name, data)
        place = self._place()
        return None if place is None else self._call_at(place, name, data)

    def call_before_step(self, name: str, data: bytes) -> list[bytes]:
        """Return the bytes of all workers, before the inner loop of a step."""
        return self._call_at(self._before_step, name, data)

    def _place(self) -> CallPlace | None:
        """Return this worker's place in the script if it may make calls there; else None."""
        current, applied = self._loop.current, self._loop.applied
        if self._loop.over:
            number = self._participant.ledger.loop
            # The script's calls are counted from the first one after the loop, on every worker alike.
            name = after_loop(number) if self._loop.loop_end.digest is not None else meeting_at_end(number)
            return CallPlace(name=name, step=applied, kept=True)
        if current is None or not (current._done or current._is_ahead):
            return None
        return CallPlace(name=str(applied), step=applied) if current._done else self._before_step

    @property
    def _before_step(self) -> CallPlace:
        applied = self._loop.applied
        return CallPlace(name=f"before{applied}", step=applied, before_step=True)

    def _call_at(self, place: CallPlace, name: str, data: bytes) -> list[bytes]:
        loop = self._loop
        phase = Phase.ENDING if loop.over else Phase.UPDATING
        step = loop.applied if place.before_step else max(0, loop.applied - 1)
        last = loop.step_result.last
        under = last.under.number if last is not None else self._participant.ledger.generation
        self._activity.now(Phase.CALLING, step)
        try:
            return self._calls.gather(name, data, place, under, loop.behind, loop.joining.is_followed)
        finally:
            self._activity.now(phase, step)
