"""The loop: reports in, events once each, decisions carried out in the order that the promises need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from craft.control.core.persistence import durable_of
from craft.protocol.errors import MalformedMessage
from craft.protocol.events import ParametersUnequal, StateDiverged, StepRetried, StopRequested, WorkerFailed
from craft.protocol.messages import Exited, WorkerReport

if TYPE_CHECKING:
    from tests.unit.control.conftest import Lab

MakeWorker = Callable[..., WorkerReport]
MakeExit = Callable[..., Exited]


def test_workers_that_joined_get_a_generation(lab: Lab, worker: MakeWorker) -> None:
    lab.report(worker("w0"), worker("w1", joined=False))
    assert lab.generation == 0
    lab.report(worker("w0"), worker("w1"))
    assert lab.names() == ["WorkerJoined", "WorkerJoined"]
    assert lab.loop.state.members == ("w0", "w1")


def test_a_generation_is_durable_before_anyone_is_told_P3(lab: Lab, worker: MakeWorker) -> None:
    lab.report(worker("w0"), worker("w1"))
    assert lab.order == ["WorkerJoined", "tell", "WorkerJoined", "save", "Reconfigure", "tell"]
    assert lab.saved[-1].generation == lab.told[-1].generation


def test_repeated_reports_make_each_event_once(running: Lab, worker: MakeWorker, dead: MakeExit) -> None:
    for _ in range(3):
        running.report(worker("w0", generation=1, broken=1), worker("w1", generation=1), exited=(dead("w1"),))
    assert running.names() == [
        "WorkerJoined",
        "WorkerJoined",
        "GenerationEntered",
        "GenerationEntered",
        "WorkerLost",
    ]


def test_a_killed_worker_is_lost_with_the_signal_as_reason(running: Lab, worker: MakeWorker, dead: MakeExit) -> None:
    running.report(worker("w0", generation=1), exited=(dead("w1"),))
    lost = next(line for line in running.lines if line.get("event") == "WorkerLost")
    assert (lost["reason"], lost["time"]) == ("killed by SIGKILL", 999.5)
    assert running.loop.state.members == ("w0",)
    assert [fault.worker_ids for fault in running.loop.faults] == [("w1",)]
    assert (running.loop.faults[0].generation, running.loop.faults[0].next_generation) == (1, 2)


def test_an_exit_code_is_the_reason_where_no_exception_was_reported(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    running.report(worker("w0", generation=1), exited=(dead("w1", signal=None, exit_code=7),))
    assert running.loop.faults[0].reason == "exit code 7"


def test_a_failed_worker_is_not_lost_a_second_time_by_its_exit(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    failed = WorkerFailed(worker_id="w1", error="ValueError: x", traceback="...", step=3, microbatch=1)
    running.report(
        worker("w0", generation=1),
        worker("w1", generation=1, failed=failed),
        exited=(dead("w1", signal=None, exit_code=1),),
    )
    assert running.names()[-2:] == ["WorkerFailed", "WorkerEnded"]
    assert running.names("action") == ["Reconfigure", "Reconfigure"]
    assert len(running.loop.faults) == 1


def test_an_exception_that_is_reported_after_the_exit_still_stops_a_broken_script(
    lab: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    lab.report(worker("w0"), worker("w1"), exited=(dead("w0", signal=None, exit_code=1),))
    failed = WorkerFailed(worker_id="w0", error="NameError: x", traceback="the traceback")
    lab.report(worker("w0", failed=failed), worker("w1"), exited=(dead("w0", signal=None, exit_code=1),))
    stopping = lab.loop.state.stopping
    assert stopping is not None
    assert (stopping.exit_code, stopping.traceback) == (1, "the traceback")


def test_who_was_still_starting_when_the_job_was_over_is_not_lost(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    done = [worker(name, generation=1, step=9, complete=True, digest="abc") for name in ("w0", "w1")]
    over = tuple(dead(name, signal=None, exit_code=0) for name in ("w0", "w1"))
    running.report(*done, worker("w2", joined=False), exited=over)
    assert running.loop.state.stopping is not None
    running.report(*done, worker("w2", joined=False), exited=(*over, dead("w2", signal=15)))
    assert "WorkerLost" not in running.names()


def test_workers_that_finish_end_the_job_and_leave_their_digest(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    done = [worker(name, generation=1, step=9, complete=True, digest="abc") for name in ("w0", "w1")]
    running.report(*done, exited=tuple(dead(name, signal=None, exit_code=0) for name in ("w0", "w1")))
    finished = [line for line in running.lines if line.get("event") == "WorkerFinished"]
    assert [(line["worker_id"], line["step"], line["digest"]) for line in finished] == [
        ("w0", 9, "abc"),
        ("w1", 9, "abc"),
    ]
    stopping = running.loop.state.stopping
    assert stopping is not None
    assert stopping.exit_code == 0
    assert not running.loop.faults


def test_exit_code_0_says_nothing_of_a_worker_that_did_not_say_more(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    """As by os._exit(0), on one worker and then on the other."""
    both = [worker(name, generation=1, step=31, total_steps=150) for name in ("w0", "w1")]
    first, second = (dead(name, signal=None, exit_code=0) for name in ("w0", "w1"))

    running.report(*both, exited=(first,))
    assert running.generation == 2 and running.loop.state.stopping is None
    # A job that begins again need not wait for the lease of a process that is gone.
    assert not running.loop.report_events.index.may_run("w0")
    running.report(*both, exited=(first, second))

    stopping = running.loop.state.stopping
    assert stopping is not None and stopping.exit_code == 1
    assert "the script left before its end" in stopping.reason
    assert "WorkerFinished" not in running.names()


def test_workers_that_leave_before_the_first_step_end_the_job_badly(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    running.report(worker("w0"), worker("w1"), exited=(dead("w0", signal=None, exit_code=0),))

    stopping = running.loop.state.stopping
    assert stopping is not None and stopping.exit_code == 1 and "before the first step" in stopping.reason


def test_one_worker_that_leaves_before_its_first_step_was_reported_ends_nothing(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    """Steps are reported with some delay."""
    running.report(
        worker("w0", generation=1), worker("w1", generation=1), exited=(dead("w0", signal=None, exit_code=0),)
    )

    assert running.generation == 2 and running.loop.state.stopping is None


def test_a_script_that_ends_itself_before_it_joins_is_no_fault(lab: Lab, worker: MakeWorker, dead: MakeExit) -> None:
    both = [worker(name, joined=False, script_ended=True) for name in ("w0", "w1")]
    lab.report(*both, exited=tuple(dead(name, signal=None, exit_code=0) for name in ("w0", "w1")))

    stopping = lab.loop.state.stopping
    assert stopping is not None and stopping.exit_code == 0
    assert stopping.reason == "every worker finished before it joined the others: nothing was trained"


def test_a_job_whose_script_left_its_loop_says_how_far_it_came(running: Lab, worker: MakeWorker) -> None:
    running.report(*(worker(name, generation=1, step=32, total_steps=150, complete=True) for name in ("w0", "w1")))

    stopping = running.loop.state.stopping
    assert stopping is not None and stopping.exit_code == 0
    assert stopping.reason == "every worker finished after 32 of 150 steps: the script left its loop there"


def test_a_broken_exchange_waits_for_a_death_to_show(running: Lab, worker: MakeWorker, dead: MakeExit) -> None:
    running.report(worker("w0", generation=1, broken=1), worker("w1", generation=1))
    running.report(worker("w0", generation=1, broken=1), worker("w1", generation=1), exited=(dead("w1"),))
    running.pass_s(1.0)
    assert "GenerationStuck" not in running.names()
    assert running.generation == 2


def test_a_broken_exchange_that_nothing_explains_leads_to_the_same_members_again(
    running: Lab, worker: MakeWorker
) -> None:
    running.report(worker("w0", generation=1, broken=1), worker("w1", generation=1, broken=1))
    assert running.names("action")[1:] == ["Watch", "Watch"]
    assert running.generation == 1
    running.pass_s(0.25)
    assert running.names().count("GenerationStuck") == 1
    assert (running.generation, running.loop.state.members) == (2, ("w0", "w1"))
    assert not running.loop.faults


def test_a_broken_report_about_an_old_generation_is_no_event(running: Lab, worker: MakeWorker) -> None:
    running.report(worker("w0", generation=1, broken=1), worker("w1", generation=1))
    running.pass_s(0.25)
    running.report(worker("w0", generation=2), worker("w1", generation=1, broken=1))
    assert running.names().count("ExchangeBroken") == 1


def test_what_is_only_journaled_is_journaled_once_whoever_reports_it(running: Lab, worker: MakeWorker) -> None:
    retried = StepRetried(generation=1, step=4, given=(2, 3))
    unequal = ParametersUnequal(worker_ids=("w1",), source="w0", first="weight")
    for _ in range(2):
        running.report(
            worker("w0", generation=1, retried=retried, unequal=unequal),
            worker("w1", generation=1, retried=retried, unequal=unequal),
        )
    assert running.names()[4:] == ["ParametersUnequal", "StepRetried"]


def test_diverged_state_stops_the_job(running: Lab, worker: MakeWorker) -> None:
    diverged = StateDiverged(step=4, detail="weight differs", worker_ids=("w0", "w1"))
    running.report(worker("w0", generation=1, diverged=diverged), worker("w1", generation=1))
    assert running.loop.state.stopping is not None
    assert running.saved[-1].stopping == running.loop.state.stopping


def test_a_worker_that_its_agent_forgot_is_lost(running: Lab, worker: MakeWorker) -> None:
    running.report(worker("w0", generation=1), pid=2)
    assert running.loop.state.members == ("w0",)


def test_a_lost_host_takes_the_workers_that_have_not_joined_with_it(lab: Lab, worker: MakeWorker) -> None:
    lab.report(worker("w0"), host="a")
    lab.report(worker("w1", joined=False), host="b")
    lab.loop.lose_host("b", "silent")
    assert lab.loop.state.members == ("w0",)


def test_a_host_without_living_workers_is_not_lost(running: Lab) -> None:
    running.loop.lose_host("b", "silent")
    assert "HostLost" not in running.names()


def test_a_lost_host_is_one_fault(running: Lab, worker: MakeWorker) -> None:
    running.report(worker("w0", generation=1, step=3), worker("w1", generation=1, step=3))
    running.loop.lose_host("a", "silent")
    assert [(fault.host, fault.worker_ids) for fault in running.loop.faults] == [("a", ("w0", "w1"))]
    assert running.loop.state.stopping is not None


def test_losses_after_the_job_is_over_are_no_faults(running: Lab, worker: MakeWorker, dead: MakeExit) -> None:
    running.loop.handle(StateDiverged(step=1, detail="bits", worker_ids=("w0", "w1")))
    running.report(worker("w0", generation=1), worker("w1", generation=1), exited=(dead("w1", signal=15),))
    assert not running.loop.faults


def test_a_loss_while_the_job_winds_down_is_answered_like_any_other(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    running.loop.handle(StopRequested(reason="enough"))
    assert running.loop.state.winding_down == "enough" and running.loop.state.stopping is None
    running.report(worker("w0", generation=1), worker("w1", generation=1), exited=(dead("w1", signal=9),))
    assert running.generation == 2 and len(running.loop.faults) == 1


def test_late_reports_of_a_lost_worker_change_nothing(running: Lab, worker: MakeWorker) -> None:
    running.loop.lose_worker("w1", "reported", "api")
    state, events = running.loop.state, running.names()
    running.report(worker("w0"), worker("w1", generation=1, broken=2))
    running.report(worker("w0"), worker("w1", generation=7))
    assert (running.loop.state, running.names()) == (state, events)


def test_a_joiner_that_enters_and_dies_in_one_report_is_a_loss_of_the_entered_generation(
    running: Lab, worker: MakeWorker, dead: MakeExit
) -> None:
    running.report(worker("w0", generation=1), exited=(dead("w1"),))
    running.report(worker("w0", generation=2), worker("w2"), exited=(dead("w1"),))
    upcoming = running.loop.state.upcoming
    assert upcoming is not None
    assert upcoming.number == 3
    running.report(worker("w0", generation=3), worker("w2", generation=3), exited=(dead("w1"), dead("w2")))
    assert running.loop.faults[-1].generation == 3
    assert (running.generation, running.loop.state.members) == (4, ("w0",))


def test_an_entered_generation_is_durable_as_the_running_one(running: Lab, worker: MakeWorker, dead: MakeExit) -> None:
    running.report(worker("w0", generation=1), exited=(dead("w1"),))
    running.report(worker("w0", generation=2), worker("w2"), exited=(dead("w1"),))
    assert running.saved[-1].upcoming is not None
    running.report(worker("w0", generation=3), worker("w2"), exited=(dead("w1"),))
    assert running.saved[-1].generation == running.loop.state.generation
    assert running.saved[-1].upcoming is None


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({"name": ""}, "worker_id"),
        ({"name": "w0", "generation": -1}, "generation"),
        ({"name": "w0", "generation": 10**30}, "generation"),
        ({"name": "w0", "step": -4}, "step"),
    ],
)
def test_a_report_that_cannot_be_true_changes_nothing(
    running: Lab, worker: MakeWorker, report: dict[str, object], field: str
) -> None:
    before = (running.loop.state, list(running.lines), running.loop.reports)
    with pytest.raises(MalformedMessage) as caught:
        running.report(worker(**report))
    assert field in caught.value.field
    assert (running.loop.state, running.lines, running.loop.reports) == before


def test_a_worker_id_cannot_be_used_on_two_hosts(running: Lab, worker: MakeWorker) -> None:
    with pytest.raises(MalformedMessage, match="in use on host a"):
        running.report(worker("w0"), host="b")


def test_a_restarted_loop_never_uses_a_number_again_P3(
    running: Lab, make_lab: type[Lab], worker: MakeWorker, dead: MakeExit
) -> None:
    running.report(worker("w0", generation=1), exited=(dead("w1"),))
    again = make_lab(durable=running.saved[-1])
    assert again.generation == 2
    again.report(worker("w0", generation=2), worker("w3"))
    upcoming = again.loop.state.upcoming
    assert upcoming is not None
    assert upcoming.number == 3


def test_a_restarted_loop_knows_who_must_not_come_back_P3(
    running: Lab, make_lab: type[Lab], worker: MakeWorker
) -> None:
    running.loop.lose_worker("w1", "reported", "api")
    again = make_lab(durable=running.saved[-1])
    again.report(worker("w0", generation=2), worker("w1", generation=1))
    view = again.loop.state.view("w1")
    assert view is not None
    assert view.standing == "lost"


def test_a_restarted_loop_adopts_what_was_upcoming_once_it_is_entered(
    running: Lab, make_lab: type[Lab], worker: MakeWorker, dead: MakeExit
) -> None:
    running.report(worker("w0", generation=1), exited=(dead("w1"),))
    running.report(worker("w0", generation=2), worker("w2"), exited=(dead("w1"),))
    again = make_lab(durable=durable_of(running.loop.state))
    again.report(worker("w0", generation=3), worker("w2", generation=3), exited=(dead("w1"),))
    assert again.loop.state.members == ("w0", "w2")
    assert not again.names("action")


def test_a_host_whose_agent_was_started_again_replaces_workers_again(running: Lab, worker: MakeWorker) -> None:
    both = worker("w0", generation=1), worker("w1", generation=1)
    for exhausted in ("--max-restarts is 1", "--max-restarts is 1", None, None):
        running.report(*both, exhausted=exhausted)
    assert running.names()[-2:] == ["ReplacementsEnded", "ReplacementsResumed"]
    assert running.loop.state.replaceable
