"""A job that makes room, as its lighthouse sees it through reports and time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from craft.control.agents.dispatch import directive_of
from craft.control.core.persistence import durable_of
from craft.protocol.events import (
    CheckpointRequested,
    CheckpointWritten,
    DrainRequested,
    PreemptRequested,
    StopRequested,
)
from craft.protocol.messages import Exited, HostReport, PreemptionOrder, WorkerReport

if TYPE_CHECKING:
    from tests.unit.control.conftest import Lab

MakeWorker = Callable[..., WorkerReport]
MakeExit = Callable[..., Exited]

WISH = PreemptionOrder(reason="SIGTERM", deadline=1030.0)


def written(step: int) -> CheckpointWritten:
    return CheckpointWritten(name=f"c{step}", branch=0, step=step, url="store")


def report(lab: Lab, *workers: WorkerReport, sequence: int = 1000, **more: Any) -> None:
    lab.loop.handle_report(HostReport(host="a", pid=1, sequence=sequence, workers=workers, **more))


@pytest.fixture
def members(worker: MakeWorker) -> tuple[WorkerReport, WorkerReport]:
    return worker("w0", generation=1, step=7), worker("w1", generation=1, step=7)


def test_the_wish_of_an_agent_is_one_event_however_often_it_is_repeated(
    running: Lab, members: tuple[WorkerReport, ...]
) -> None:
    for _ in range(3):
        report(running, *members, preempting=WISH)
    assert running.names().count("PreemptRequested") == 1
    assert directive_of(running.loop.state, 1).preempting == WISH


def test_a_wish_with_less_time_brings_the_deadline_forward(running: Lab, members: tuple[WorkerReport, ...]) -> None:
    running.loop.handle(PreemptRequested(reason="asked"))
    report(running, *members, preempting=WISH)
    report(running, *members, preempting=PreemptionOrder(reason="a file", deadline=1099.0))
    assert running.loop.state.preempting == PreemptionOrder(reason="asked", deadline=1030.0)
    running.pass_s(29.9)
    assert running.loop.state.stopping is None
    running.pass_s(0.2)
    assert running.names("action")[-1] == "Stop"


def test_the_last_to_leave_says_with_the_same_breath_what_was_saved(running: Lab, worker: MakeWorker) -> None:
    running.loop.handle(PreemptRequested(reason="SIGTERM"))
    running.report(
        worker("w0", generation=1, step=7, left=True),
        worker("w1", generation=1, step=7, left=True, notes=(written(7),)),
    )
    stop = running.loop.state.stopping
    assert stop is not None
    assert stop.exit_code == 75
    assert stop.reason == "preempted (SIGTERM): checkpoint of step 7 is complete, go on with --resume"
    assert running.generation == 1


def test_members_hear_when_the_checkpoint_is_complete(running: Lab, worker: MakeWorker) -> None:
    noted = worker("w0", generation=1, step=7, notes=(written(7),))
    running.report(noted, worker("w1", generation=1, step=7))
    assert directive_of(running.loop.state, 1).saved is None
    running.loop.handle(PreemptRequested(reason="SIGTERM"))
    assert directive_of(running.loop.state, 1).saved == (0, 7)


def test_at_the_deadline_the_job_ends_with_the_newest_checkpoint(running: Lab, worker: MakeWorker) -> None:
    running.report(worker("w0", generation=1, notes=(written(5),)), worker("w1", generation=1))
    running.loop.handle(PreemptRequested(reason="SIGTERM", deadline=1030.0))
    running.pass_s(31)
    stop = running.loop.state.stopping
    assert stop is not None
    assert (stop.exit_code, "the newest checkpoint is that of step 5" in stop.reason) == (75, True)


def test_a_restarted_lighthouse_goes_on_with_it_and_keeps_the_deadline(
    running: Lab, make_lab: type[Lab], members: tuple[WorkerReport, ...]
) -> None:
    report(running, *members, preempting=WISH)
    again = make_lab(durable=running.saved[-1])
    assert directive_of(again.loop.state, 1).preempting == WISH
    report(again, *members, preempting=WISH)
    assert "PreemptRequested" not in again.names()
    again.pass_s(31)
    assert again.names()[-1] == "PreemptExpired"
    assert again.loop.state.stopping is not None


def test_workers_that_left_while_no_lighthouse_was_there_end_the_job_when_there_is_one(
    running: Lab, make_lab: type[Lab], worker: MakeWorker, dead: MakeExit
) -> None:
    running.loop.handle(PreemptRequested(reason="SIGTERM", deadline=1030.0))
    again = make_lab(durable=running.saved[-1])
    again.report(
        worker("w0", generation=1, step=7, left=True, notes=(written(7),)),
        worker("w1", generation=1, step=7, left=True),
        exited=tuple(dead(name, signal=None, exit_code=0) for name in ("w0", "w1")),
    )
    stop = again.loop.state.stopping
    assert stop is not None
    assert "checkpoint of step 7 is complete" in stop.reason


def test_whoever_joins_meanwhile_is_let_go(running: Lab, worker: MakeWorker) -> None:
    running.loop.handle(PreemptRequested(reason="SIGTERM"))
    running.report(worker("w0", generation=1), worker("w1", generation=1), worker("w2"))
    directive = directive_of(running.loop.state, 1)
    assert (directive.released, directive.upcoming) == (("w2",), None)


def test_a_job_of_which_every_host_is_to_leave_is_saved_if_it_can_be(running: Lab, worker: MakeWorker) -> None:
    workers = [worker(name, generation=1, checkpoints=True) for name in ("w0", "w1")]
    report(running, *workers, draining="its agent got SIGTERM", drain_deadline_s=30.0)
    assert running.names()[-2:] == ["DrainRequested", "PreemptRequested"]
    preempting = running.loop.state.preempting
    assert preempting is not None
    assert preempting.reason == "every host is to leave: its agent got SIGTERM"
    running.pass_s(31)
    assert running.loop.state.stopping is not None
    assert running.loop.state.stopping.exit_code == 75


def test_a_host_whose_lost_workers_are_being_replaced_goes_on_when_the_other_one_leaves(
    running: Lab, worker: MakeWorker
) -> None:
    """Both workers of this job were on host a; another host has just lost its own, and starts others."""
    running.report(starting=1, host="b")
    workers = [worker(name, generation=1, checkpoints=True) for name in ("w0", "w1")]
    report(running, *workers, draining="its agent got SIGTERM", drain_deadline_s=30.0)
    assert running.names()[-1] == "DrainRequested"
    running.report(worker("b-w1"), host="b")
    report(running, *workers, draining="its agent got SIGTERM", drain_deadline_s=30.0)
    assert running.loop.state.preempting is None and running.loop.state.upcoming is not None
    assert "b-w1" in running.loop.state.upcoming.worker_ids


def test_if_nobody_comes_after_all_the_job_is_saved(running: Lab, worker: MakeWorker) -> None:
    running.report(starting=1, host="b")
    workers = [worker(name, generation=1, checkpoints=True) for name in ("w0", "w1")]
    report(running, *workers, draining="its agent got SIGTERM", drain_deadline_s=30.0)
    running.report(starting=0, host="b")
    report(running, *workers, draining="its agent got SIGTERM", drain_deadline_s=30.0)
    assert running.names()[-1] == "PreemptRequested"


def test_a_job_without_checkpoints_is_only_drained(running: Lab, members: tuple[WorkerReport, ...]) -> None:
    report(running, *members, draining="its agent got SIGTERM", drain_deadline_s=30.0)
    assert running.names()[-1] == "DrainRequested"


def test_one_host_of_several_leaves_without_the_others(running: Lab, worker: MakeWorker) -> None:
    workers = [worker(name, generation=1, checkpoints=True) for name in ("w0", "w1")]
    running.report(*workers)
    running.loop.handle(DrainRequested(worker_id="w1"))
    assert running.loop.state.preempting is None


def test_a_wish_for_a_checkpoint_has_a_number_of_its_own_also_after_a_restart(
    running: Lab, make_lab: type[Lab]
) -> None:
    running.loop.handle(CheckpointRequested(reason="asked", tag="best"))
    again = make_lab(durable=running.saved[-1])
    again.loop.handle(CheckpointRequested(reason="asked"))
    wishes = directive_of(again.loop.state, 1).wishes
    assert [(wish.number, wish.tag) for wish in wishes] == [(1, "best"), (2, None)]


def test_a_stop_survives_a_restart_of_the_lighthouse(running: Lab, make_lab: type[Lab]) -> None:
    running.loop.handle(StopRequested(reason="enough"))
    assert running.saved[-1] == durable_of(running.loop.state)
    assert make_lab(durable=running.saved[-1]).loop.state.winding_down == "enough"
