"""What is measured of a step, and when somebody is told who is slow."""

from __future__ import annotations

from msgspec.structs import replace

from craft.decide.detect.stragglers import EVEN, MemberSpeeds, SlowEvidence
from craft.decide.step.ledger import Ledger
from craft.decide.techniques import defaults
from craft.decide.techniques.technique import Moment
from craft.protocol.events import Event, StragglerFound, StragglerGone
from craft.protocol.messages import StepTimes
from craft.protocol.values.activity import Phase
from craft.worker.monitor.stragglers import SpeedTracker
from craft.worker.report.activity_page import ActivityPage

SLOW = SlowEvidence(rank=1, score=6.0, steps=8, counted=8, own_us=240_000, others_us=80_000, found=True, slowness=3.0)


class Scene:
    """A worker of two: what it does, what it knows of the other, and what it says."""

    def __init__(self, worker_id: str = "w0") -> None:
        self.said: list[Event] = []
        self.noted: list[Event] = []
        self.activity = ActivityPage(None)
        self.ledger = Ledger(worker_id=worker_id, members=("w0", "w1"), generation=1)
        self.pacing = SpeedTracker(defaults(), self.activity, lambda: self.ledger, self.noted.append, self.said.append)

    def commits(self, pace: MemberSpeeds = EVEN) -> None:
        self.ledger = replace(self.ledger, pace=pace)
        self.pacing.committed(0.0)
        self.pacing.after_commit(
            Moment(step=9, branch=0, generation=self.ledger.generation, members=self.ledger.members)
        )


def a_step(activity: ActivityPage, *, microbatches: int = 2) -> None:
    """As if it had taken its time: the clock of a busy machine would make these tests fail now and then."""
    activity.spent_s[Phase.UPDATING] += 0.005
    activity.spent_s[Phase.LOADING] += 0.002 * microbatches
    activity.spent_s[Phase.COMPUTING] += 0.008 * microbatches
    activity.spent_s[Phase.EXCHANGING] += 0.010


def test_the_word_says_how_long_a_microbatch_took_without_what_was_waited_for() -> None:
    scene = Scene()
    a_step(scene.activity)

    assert scene.pacing.busy_us(2) == 10_000
    assert scene.pacing.busy_us(0) == 0


def test_a_microbatch_that_took_no_time_is_still_one() -> None:
    assert Scene().pacing.busy_us(1) == 1


def test_every_step_is_measured_anew() -> None:
    scene = Scene()
    a_step(scene.activity, microbatches=4)
    scene.commits()
    a_step(scene.activity, microbatches=1)

    assert scene.pacing.busy_us(1) == 10_000


def test_where_the_time_of_a_step_goes_is_told_apart() -> None:
    scene = Scene()
    a_step(scene.activity)
    scene.pacing.busy_us(2)

    assert scene.pacing.committed(waited_s=0.006) == StepTimes(
        microbatch_s=0.010, loading_s=0.004, computing_s=0.016, exchanging_s=0.004, waiting_s=0.006, updating_s=0.005
    )


def test_rank_0_tells_the_lighthouse_and_every_worker_its_script() -> None:
    first, second = Scene("w0"), Scene("w1")
    for scene in (first, second):
        scene.commits(MemberSpeeds((SLOW,)))
        scene.commits(MemberSpeeds((SLOW,)))
        scene.commits()

    assert first.noted == first.said == second.said
    assert second.noted == []
    found, gone = first.said
    assert isinstance(found, StragglerFound) and isinstance(gone, StragglerGone)
    assert (found.worker_id, found.ratio, found.own_ms, found.others_ms) == ("w1", 3.0, 30.0, 10.0)


def test_one_that_is_only_suspected_is_not_told_of() -> None:
    scene = Scene()
    scene.commits(MemberSpeeds((replace(SLOW, found=False),)))

    assert scene.said == []


def test_a_new_generation_is_not_taken_for_the_end_of_slowness() -> None:
    scene = Scene()
    scene.commits(MemberSpeeds((SLOW,)))
    scene.ledger = replace(scene.ledger, generation=2)
    scene.commits()
    scene.commits(MemberSpeeds((SLOW,)))

    assert [type(event) for event in scene.said] == [StragglerFound, StragglerFound]
