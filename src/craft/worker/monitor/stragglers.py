"""Measure this worker's speed and report slow members to the lighthouse and the script."""

from __future__ import annotations

from collections.abc import Callable

from craft.decide.detect.stragglers import SlowEvidence
from craft.decide.step.ledger import Ledger
from craft.decide.techniques import Stragglers
from craft.decide.techniques.technique import Chosen, Hooks, Moment
from craft.protocol.events import StragglerFound, StragglerGone
from craft.protocol.messages import StepTimes
from craft.protocol.values.activity import Phase
from craft.worker.report.activity_page import ActivityPage

_SMOOTHING = 0.1

StragglerEvent = StragglerFound | StragglerGone


class SpeedTracker(Hooks):
    """Belongs to the main thread. Always measures; reports slow members if the technique ``stragglers`` is on."""

    def __init__(
        self,
        techniques: Chosen,
        activity: ActivityPage,
        ledger: Callable[[], Ledger],
        note: Callable[[StragglerEvent], None],
        emit: Callable[[StragglerEvent], None],
    ) -> None:
        """``note`` reports to the lighthouse, ``emit`` to the script."""
        stragglers = techniques.get(Stragglers)
        self._answer = stragglers.settings.answer if stragglers is not None else ""
        self._activity = activity
        self._ledger = ledger
        self._note = note
        self._emit = emit
        self._marks = list(activity.spent_s)
        """Seconds spent in each phase when the last step was committed."""
        self._busy_s = 0.0
        """Seconds per microbatch, as last sent to the others."""
        self._smoothed: tuple[float, ...] = ()
        self._found: dict[str, SlowEvidence] = {}
        self._generation = 0

    def busy_us(self, num_computed: int) -> int:
        """Return how long a microbatch of the step in flight took, for the word; 0 if there was none."""
        if num_computed == 0:
            return 0
        self._busy_s = (self._spent(Phase.LOADING) + self._spent(Phase.COMPUTING)) / num_computed
        # At least 1: 0 means that nothing was measured.
        return max(1, round(self._busy_s * 1e6))

    def _spent(self, phase: Phase) -> float:
        return self._activity.spent_s[phase] - self._marks[phase]

    def committed(self, waited_s: float) -> StepTimes:
        """Return where the time goes, smoothed; call it after a commit, when the phase ``updating`` has begun."""
        loading, computing, exchanging, updating = map(
            self._spent, (Phase.LOADING, Phase.COMPUTING, Phase.EXCHANGING, Phase.UPDATING)
        )
        latest = (self._busy_s, loading, computing, max(0.0, exchanging - waited_s), waited_s, updating)
        self._marks = list(self._activity.spent_s)
        before = self._smoothed or latest
        self._smoothed = tuple(old + _SMOOTHING * (new - old) for old, new in zip(before, latest, strict=True))
        busy, loading, computing, exchanging, waiting, updating = (round(each, 6) for each in self._smoothed)
        return StepTimes(
            microbatch_s=busy,
            loading_s=loading,
            computing_s=computing,
            exchanging_s=exchanging,
            waiting_s=waiting,
            updating_s=updating,
        )

    def after_commit(self, moment: Moment) -> None:
        """Report new stragglers and those that are fast again. All members know them; rank 0 tells the lighthouse."""
        ledger = self._ledger()
        if ledger.generation != self._generation:
            # All members measure anew: a member that is still slow is found again.
            self._generation, self._found = ledger.generation, {}
        if not self._found and not ledger.pace.suspicions:
            return
        found = {ledger.members[each.rank]: each for each in ledger.pace.found}
        events: list[StragglerEvent] = [
            self._found_event(worker_id, found[worker_id], moment.step)
            for worker_id in found.keys() - self._found.keys()
        ]
        events += [
            StragglerGone(worker_id=worker_id, generation=ledger.generation, step=moment.step)
            for worker_id in self._found.keys() - found.keys()
        ]
        self._found = found
        for event in sorted(events, key=lambda each: each.worker_id):
            if ledger.rank == 0:
                self._note(event)
            self._emit(event)

    def _found_event(self, worker_id: str, seen: SlowEvidence, step: int) -> StragglerFound:
        return StragglerFound(
            worker_id=worker_id,
            generation=self._generation,
            step=step,
            ratio=round(seen.ratio, 2),
            own_ms=round(seen.own_us / seen.counted / 1e3, 3),
            others_ms=round(seen.others_us / seen.counted / 1e3, 3),
            steps=seen.steps,
            answer=self._answer,
        )
