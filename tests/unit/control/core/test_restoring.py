"""A job that begins again: what is durable, what is told, and what a lighthouse that is killed meanwhile changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craft.control.agents.dispatch import directive_of
from craft.control.core.loop import ARRIVALS_S
from craft.decide.job.restoration import RestoreSettings
from craft.protocol.events import CheckpointWritten
from craft.protocol.membership import Member
from craft.protocol.messages import Exited, WorkerReport

if TYPE_CHECKING:
    from tests.unit.control.conftest import Lab

WRITTEN = CheckpointWritten(name="0000-000000000120-1x", branch=0, step=120, url="checkpoints")


def worker(name: str, *, generation: int = 0, step: int = 0, late: bool = False, saved: bool = False) -> WorkerReport:
    return WorkerReport(
        member=Member(worker_id=name, late=late),
        pid=100,
        joined=True,
        generation=generation,
        step=step,
        notes=(WRITTEN,) if saved else (),
    )


def latecomer(name: str, *, generation: int = 0, step: int = 0) -> WorkerReport:
    return worker(name, generation=generation, step=step, late=True)


def dead(name: str) -> Exited:
    return Exited(worker_id=name, exit_code=None, signal=9, time=999.5)


def lost_all(lab: Lab) -> None:
    """Two workers come to step 134 and are killed at the same instant."""
    lab.report(worker("w0"), worker("w1"))
    both = (worker("w0", generation=1, step=134, saved=True), worker("w1", generation=1, step=133))
    lab.report(*both)
    lab.report(*both, exited=(dead("w0"), dead("w1")))


def test_when_all_are_lost_the_job_begins_again_and_says_why(lab: Lab) -> None:
    lost_all(lab)
    (line,) = [line for line in lab.lines if line.get("action") == "Restore"]
    assert (
        line["reason"]
        == "no worker is left: begins again from the checkpoint of step 120, at least 14 steps are computed once more"
    )
    assert lab.order.index("Restore") > lab.order.index("save")
    assert lab.loop.state.restoring and lab.loop.state.stopping is None
    told = directive_of(lab.told[-1], 1)
    assert told.generation is None
    assert told.restoration is not None and (told.restoration.number, told.restoration.branch) == (1, 1)


def test_the_generation_that_follows_has_a_number_past_all_others_and_nobody_who_waits_for_state(lab: Lab) -> None:
    lost_all(lab)
    before = lab.loop.state.highest
    lab.report(latecomer("w2"))
    assert lab.generation == 0
    lab.report(latecomer("w2"), latecomer("w3"))
    made = lab.loop.state.generation
    assert made is not None and made.number == before + 1 and made.worker_ids == ("w2", "w3")
    assert all(member.since == 0 for member in made.members)


def test_a_job_that_begins_again_waits_for_those_on_their_way_and_for_nobody_else(lab: Lab) -> None:
    lost_all(lab)
    lab.report(latecomer("w2"), starting=1)
    lab.pass_s(10 * ARRIVALS_S)
    assert lab.generation == 0, "an agent says that another one comes"
    lab.report(latecomer("w2"))
    lab.pass_s(ARRIVALS_S + 0.1)
    made = lab.loop.state.generation
    assert made is not None and made.worker_ids == ("w2",)
    assert lab.lines[-1]["reason"] == "1 worker begins again: nobody else is on the way"


def test_those_of_a_host_that_fell_silent_are_not_on_their_way(lab: Lab) -> None:
    lost_all(lab)
    lab.report(starting=2, host="b")
    lab.report(latecomer("w2"))
    lab.loop.suspect_host("b", "silent for 1.0 s")
    lab.pass_s(ARRIVALS_S + 0.1)
    assert lab.generation > 0


def test_a_job_to_which_too_few_come_waits_for_its_limit_whoever_is_on_the_way(make_lab: type[Lab]) -> None:
    lab = make_lab(min_workers=2)
    lost_all(lab)
    lab.report(latecomer("w2"))
    lab.pass_s(RestoreSettings().limit_s - 1)
    assert lab.loop.state.restoring and "ArrivalsEnded" not in lab.names()


def test_a_lighthouse_that_is_started_again_meanwhile_also_waits_for_nobody_else(lab: Lab, make_lab: type[Lab]) -> None:
    lost_all(lab)
    again = make_lab(durable=lab.saved[-1])
    again.report(latecomer("w2"), exited=(dead("w0"), dead("w1")))
    again.pass_s(ARRIVALS_S + 0.1)
    assert again.generation == lab.loop.state.highest + 1


def test_a_lighthouse_that_is_killed_while_a_job_begins_again_is_followed_by_one_that_goes_on_with_it(
    lab: Lab, make_lab: type[Lab]
) -> None:
    lost_all(lab)
    again = make_lab(durable=lab.saved[-1])
    assert again.loop.state.restoring
    ends = (dead("w0"), dead("w1"))
    again.report(latecomer("w2"), exited=ends)
    assert again.generation == 0
    again.report(latecomer("w2"), latecomer("w3"), exited=ends)
    assert again.generation == lab.loop.state.highest + 1
    told = directive_of(again.told[-1], 1)
    assert told.restoration == lab.loop.state.restoration


def test_a_lighthouse_that_is_killed_with_all_workers_lets_the_job_begin_again_P3(
    lab: Lab, make_lab: type[Lab]
) -> None:
    """It was killed before it heard of the losses; the agent tells the next one, with what it knew of the workers."""
    lab.report(worker("w0"), worker("w1"))
    again = make_lab(durable=lab.saved[-1])
    again.loop.handle(WRITTEN)
    again.report(
        worker("w0", generation=1, step=134), worker("w1", generation=1, step=133), exited=(dead("w0"), dead("w1"))
    )
    assert again.loop.state.restoring
    (line,) = [line for line in again.lines if line.get("action") == "Restore"]
    assert "at least 14 steps are computed once more" in line["reason"]


def test_a_lighthouse_that_is_killed_meanwhile_still_gives_up_when_nobody_comes(lab: Lab, make_lab: type[Lab]) -> None:
    lost_all(lab)
    again = make_lab(durable=lab.saved[-1])
    again.pass_s(RestoreSettings().limit_s + 1)
    stop = again.loop.state.stopping
    assert stop is not None and stop.exit_code == 3


def test_the_second_time_has_a_number_and_a_branch_of_its_own_P3(lab: Lab) -> None:
    lost_all(lab)
    lab.report(latecomer("w2"), latecomer("w3"))
    both = latecomer("w2", generation=lab.generation, step=125), latecomer("w3", generation=lab.generation, step=125)
    lab.report(*both)
    lab.report(*both, exited=(dead("w2"), dead("w3")))
    again = lab.loop.state.restoration
    assert again is not None and (again.number, again.branch, again.step) == (2, 2, 120)
    assert (again.tries, again.furthest) == (2, 134), "nothing came of it that was not there before"


def test_a_job_that_is_lost_at_the_same_step_each_time_ends_also_if_the_lighthouse_is_killed_meanwhile(
    lab: Lab, make_lab: type[Lab]
) -> None:
    lost_all(lab)
    ends = [dead("w0"), dead("w1")]
    for number in (2, 4, 6):
        names = (f"w{number}", f"w{number + 1}")
        lab.report(*map(latecomer, names), exited=tuple(ends))
        both = [latecomer(name, generation=lab.generation, step=130) for name in names]
        lab.report(*both, exited=tuple(ends))
        ends += map(dead, names)
        durable = lab.saved[-1]
        lab = make_lab(durable=durable)
        lab.loop.handle(WRITTEN)
        lab.report(*both, exited=tuple(ends))
    stop = lab.loop.state.stopping
    assert stop is not None and stop.exit_code == 3
    assert "began 3 times from the checkpoint of step 120 and came no further than before, to step 134" in stop.reason
