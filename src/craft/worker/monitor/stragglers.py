"""How fast this worker is, and which members are slow: measured on the way, told to the others, to lighthouse and script.

Enters: how long the main thread was in each phase (``activity``), and how long it waited for others. Leaves: what this worker
adds to its word, the ``StepTimes`` of its report, ``StragglerFound`` and ``StragglerGone``. ``Training`` calls it.
"""

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

Told = StragglerFound | StragglerGone


class SpeedTracker(Hooks):
    """Owned by the main thread. Measures in any case; who is slow is told where the technique ``stragglers`` is on."""

    def __init__(
        self,
        techniques: Chosen,
        activity: ActivityPage,
        ledger: Callable[[], Ledger],
        note: Callable[[Told], None],
        emit: Callable[[Told], None],
    ) -> None:
        """``note`` tells the lighthouse, ``emit`` the script."""
        stragglers = techniques.get(Stragglers)
        self._answer = stragglers.settings.answer if stragglers is not None else ""
        self._activity = activity
        self._ledger = ledger
        self._note = note
        self._emit = emit
        self._marks = list(activity.spent_s)
        """What was spent in each phase when the last step was committed."""
        self._busy_s = 0.0
        """Of one microbatch, as it was told to the others last."""
        self._smoothed: tuple[float, ...] = ()
        self._found: dict[str, SlowEvidence] = {}
        self._generation = 0

    def busy_us(self, num_computed: int) -> int:
        """How long a microbatch took in the step in flight, for the word; 0 if there was none."""
        if num_computed == 0:
            return 0
        self._busy_s = (self._spent(Phase.LOADING) + self._spent(Phase.COMPUTING)) / num_computed
        # At least 1: 0 would say that nothing was measured.
        return max(1, round(self._busy_s * 1e6))

    def _spent(self, phase: Phase) -> float:
        return self._activity.spent_s[phase] - self._marks[phase]

    def committed(self, waited_s: float) -> StepTimes:
        """A step was committed, and the phase ``updating`` has begun; returns where the time goes, smoothed."""
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
        """Say who was found since the last step, and who is fast again. All know it; rank 0 tells the lighthouse."""
        ledger = self._ledger()
        if ledger.generation != self._generation:
            # Everybody begins anew: whoever is still slow is found again.
            self._generation, self._found = ledger.generation, {}
        if not self._found and not ledger.pace.suspicions:
            return
        found = {ledger.members[each.rank]: each for each in ledger.pace.found}
        told: list[Told] = [
            self._found_event(worker_id, found[worker_id], moment.step)
            for worker_id in found.keys() - self._found.keys()
        ]
        told += [
            StragglerGone(worker_id=worker_id, generation=ledger.generation, step=moment.step)
            for worker_id in self._found.keys() - found.keys()
        ]
        self._found = found
        for event in sorted(told, key=lambda each: each.worker_id):
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
