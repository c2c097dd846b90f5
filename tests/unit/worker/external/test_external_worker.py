"""A guest: what it makes of directives, and that it is harmless where nobody directs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest

from craft.protocol.errors import ConfigError, StateLost
from craft.protocol.events import Recovered
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Directive, PreemptionOrder
from craft.settings.worker import WorkerSettings
from craft.worker.external.external_worker import Guest
from craft.worker.external.generation_follower import Abort, Change
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel

ALONE = """
import craft
guest = craft.attend(print)
guest.step(1, loss=2.0)
with guest.exchanging(), guest.paused("a reason"):
    assert (guest.leaving, guest.generation, guest.members) == (None, 0, ("w0",))
assert craft.attend() is guest
try:
    craft.join()
except craft.ConfigError as error:
    print(error)
"""


def generation(number: int, *worker_ids: str) -> Generation:
    return Generation(number=number, nonce="test", members=tuple(Member(worker_id=each) for each in worker_ids))


def guest() -> Guest:
    return Guest(WorkerSettings(worker_id="w0"), None, ActivityPage(None))


class Reports:
    """Where a guest's reports go."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def report(self, *, urgent: bool, **changes: Any) -> None:
        self.latest |= changes

    def recovered(self) -> list[Recovered]:
        return [note for note in self.latest.get("notes", ()) if isinstance(note, Recovered)]


def member(reports: Reports, abort: Abort) -> Guest:
    """w0, in a generation with w1."""
    one = Guest(WorkerSettings(worker_id="w0"), cast(Channel, reports), ActivityPage(None))
    one.on_change(abort)
    one.direct(Directive(sequence=1, generation=generation(1, "w0", "w1")))
    assert one.await_slot()
    return one


def recovers(one: Guest, reports: Reports) -> list[Recovered]:
    """Step until a loss is told of."""
    deadline, step = time.monotonic() + 30.0, 3
    while not reports.recovered():
        assert time.monotonic() < deadline
        one.step(step)
        step += 1
    return reports.recovered()


def test_outside_of_a_job_a_guest_is_nobodys_and_does_no_harm() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=True)
    assert "a process uses one of them" in done.stdout


def test_metrics_of_a_guest_have_names_of_their_own() -> None:
    reports = Reports()
    one = member(reports, lambda _: None)
    with pytest.raises(ConfigError, match=r"guest.step\(time=...\): time is reserved"):
        one.step(1, time=2.0)
    one.step(1, committed=3, self=4.0)
    assert reports.latest["metrics"] == {"committed": 3.0, "self": 4.0}


def test_a_generation_that_only_grows_is_entered_before_it_is_current() -> None:
    one = guest()
    one.direct(Directive(sequence=1, generation=generation(1, "w0", "w1")))
    one.direct(Directive(sequence=2, generation=generation(1, "w0", "w1"), upcoming=generation(2, "w0", "w1", "w2")))
    assert (one.generation, one.members, one.leaving) == (2, ("w0", "w1", "w2"), None)


def test_a_generation_that_somebody_is_to_leave_is_entered_when_that_one_has_left() -> None:
    one = guest()
    one.direct(Directive(sequence=1, generation=generation(1, "w0", "w1")))
    one.direct(Directive(sequence=2, generation=generation(1, "w0", "w1"), upcoming=generation(2, "w0")))
    assert one.generation == 1
    one.direct(Directive(sequence=3, generation=generation(2, "w0")))
    assert one.members == ("w0",)


def test_a_guest_is_told_to_leave_as_long_as_it_is_to_leave() -> None:
    one = guest()
    one.direct(Directive(sequence=1, generation=generation(1, "w0", "w1"), upcoming=generation(2, "w1")))
    assert one.leaving is not None
    one.direct(Directive(sequence=2, generation=generation(1, "w0", "w1")))
    assert one.leaving is None, "the drain was given up"
    one.direct(Directive(sequence=3, generation=generation(1, "w0", "w1"), winding_down="seen enough"))
    assert one.leaving == "seen enough"
    one.direct(
        Directive(
            sequence=4, generation=generation(1, "w0", "w1"), preempting=PreemptionOrder(reason="the host is needed")
        )
    )
    assert one.leaving == "the host is needed"


def test_one_that_waits_for_a_slot_is_released_at_the_end_of_the_job() -> None:
    one = guest()
    one.direct(Directive(sequence=1, generation=generation(1, "w1"), stopping=True))
    assert not one.await_slot()


def test_a_change_says_what_it_is_about() -> None:
    assert Change(generation=3, members=("w0",), lost=("w1",), told=0.0).reason == "w1 is not in generation 3"
    assert "abort" in Change(generation=3, members=("w0", "w1"), lost=(), told=0.0).reason


def test_a_step_that_ends_before_the_abort_does_is_not_the_one_that_pays_for_the_loss() -> None:
    reports, begun, stepped = Reports(), threading.Event(), threading.Event()

    def abort(change: Change) -> None:
        begun.set()
        assert stepped.wait(30.0)

    one = member(reports, abort)
    one.step(1)
    one.direct(Directive(sequence=2, generation=generation(2, "w0")))
    assert begun.wait(30.0)
    one.step(2)
    assert not reports.recovered()
    stepped.set()
    (told,) = recovers(one, reports)
    # The loss hit generation 1: by that the lighthouse knows which one this was.
    assert (told.since, told.generation, told.lost) == (1, 2, ("w1",))


def test_a_generation_that_grows_after_a_loss_does_not_hide_the_loss() -> None:
    reports, goes_on = Reports(), threading.Event()
    one = member(reports, lambda change: cast(None, goes_on.wait(30.0)))
    one.step(1)
    one.direct(Directive(sequence=2, generation=generation(2, "w0")))
    one.direct(Directive(sequence=3, generation=generation(3, "w0", "w2")))
    one.step(2)
    goes_on.set()
    (told,) = recovers(one, reports)
    assert (told.since, told.lost) == (1, ("w1",))


def test_of_two_that_are_to_leave_the_slower_one_still_is_when_the_other_has_left() -> None:
    one = guest()
    one.direct(Directive(sequence=1, generation=generation(1, "w0", "w1", "w2"), upcoming=generation(2, "w2")))
    one.direct(Directive(sequence=2, generation=generation(2, "w2")))
    assert one.leaving is not None


def test_one_that_leaves_does_not_finish_the_job_though_all_others_are_lost_while_it_ends() -> None:
    reports = Reports()
    one = member(reports, lambda change: None)
    one.direct(Directive(sequence=2, generation=generation(1, "w0", "w1"), upcoming=generation(2, "w1")))
    assert one.leaving is not None
    one.direct(Directive(sequence=3, generation=generation(2, "w0")))
    one.finish()
    assert reports.latest["left"] and "complete" not in reports.latest


def test_one_whose_drain_was_given_up_finishes_like_any_other() -> None:
    reports = Reports()
    one = member(reports, lambda change: None)
    one.direct(Directive(sequence=2, generation=generation(1, "w0", "w1"), upcoming=generation(2, "w1")))
    assert one.leaving is not None
    one.direct(Directive(sequence=3, generation=generation(1, "w0", "w1")))
    assert one.leaving is None
    one.finish()
    assert reports.latest["complete"] and "left" not in reports.latest


def test_one_that_had_the_job_begin_again_waits_for_its_end_and_does_not_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("craft.worker.external.external_worker._END_LIMIT_S", 4.0)
    reports = Reports()
    one = member(reports, lambda _: None)
    one.begin_again()
    ended: list[BaseException] = []

    def finish() -> None:
        try:
            one.finish()
        except StateLost as error:
            ended.append(error)

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    one.direct(Directive(sequence=2, generation=generation(2, "w0")))
    deadline = time.monotonic() + 30.0
    while reports.latest.get("state_gone") != 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "complete" not in reports.latest and "left" not in reports.latest
    # Where nobody ends it, it says so.
    thread.join(60)
    assert len(ended) == 1 and "did not begin again" in str(ended[0])


def test_one_that_went_on_after_all_finishes_like_any_other() -> None:
    reports = Reports()
    one = member(reports, lambda _: None)
    one.begin_again()
    one.step(3)
    one.finish()
    assert reports.latest["complete"] is True


def test_many_conditions_push_no_other_note_out() -> None:
    reports = Reports()
    one = member(reports, lambda change: None)
    one.saved("step=3", 3, "/saved")
    for number in range(40):
        one.tell("thermal", "heat", float(number))
    kinds = [type(note).__name__ for note in reports.latest["notes"]]
    assert kinds.count("CheckpointWritten") == 1 and 10 < kinds.count("ConditionSeen") < 40
