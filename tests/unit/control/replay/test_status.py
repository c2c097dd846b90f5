from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from craft.control.replay.checkpoints import CheckpointsStatus
from craft.control.replay.status import LighthouseStatus, Status, status_of
from craft.protocol.events import StopRequested
from craft.protocol.messages import Exited, WorkerReport

if TYPE_CHECKING:
    from tests.unit.control.conftest import Lab


def of(lab: Lab) -> Status:
    own = LighthouseStatus(pid=1, url="http://x:1")
    checkpoints = CheckpointsStatus()
    return status_of(
        lab.loop.state, lab.loop.reports, lab.loop.faults, (), own, checkpoints, worker_ids=lab.loop.worker_ids
    )


def test_the_state_of_the_job_in_one_word(
    lab: Lab, worker: Callable[..., WorkerReport], dead: Callable[..., Exited]
) -> None:
    assert of(lab).state == "forming"
    lab.report(worker("w0"), worker("w1"))
    assert of(lab).state == "running"
    lab.loop.handle(StopRequested(reason="enough"))
    assert (of(lab).state, of(lab).reason, of(lab).exit_code) == ("stopping", "enough", None)
    lab.report(worker("w0"), worker("w1"), exited=tuple(dead(name, signal=None, exit_code=0) for name in ("w0", "w1")))
    assert of(lab).state == "finished"


def test_a_job_that_gave_up_has_failed(running: Lab, worker: Callable[..., WorkerReport]) -> None:
    running.report(worker("w0", generation=1, step=3), worker("w1", generation=1, step=3))
    running.loop.lose_host("a", "silent")
    assert (of(running).state, of(running).exit_code, of(running).faults) == ("failed", 3, 1)


def test_only_members_have_ranks(
    running: Lab, worker: Callable[..., WorkerReport], dead: Callable[..., Exited]
) -> None:
    running.report(worker("w1", generation=1, step=7), worker("w2", joined=False), exited=(dead("w0"),))
    rows = {row.worker_id: (row.rank, row.state, row.step) for row in of(running).workers}
    assert rows == {"w0": (None, "lost", 0), "w1": (0, "member", 7), "w2": (None, "starting", 0)}


def test_the_worker_that_is_furthest_speaks_for_the_job(running: Lab, worker: Callable[..., WorkerReport]) -> None:
    running.report(
        worker("w0", generation=1, step=4, metrics={"loss": 2.0}, step_s=0.5, total_steps=9),
        worker("w1", generation=1, step=5, metrics={"loss": 1.0}, step_s=0.4, total_steps=9),
    )
    status = of(running)
    assert (status.step, status.total_steps, status.step_s, status.metrics) == (5, 9, 0.4, {"loss": 1.0})


def test_no_number_of_a_worker_is_free_again_also_not_for_a_lighthouse_that_starts_later(
    make_lab: type[Lab], worker: Callable[..., WorkerReport]
) -> None:
    """The one before had heard of a spare, which is in no generation, and died."""
    lab = make_lab()
    lab.report(worker("node7-w0"), worker("node7-w1"))
    lab.report(worker("node7-w0"), worker("node7-w1"), worker("node7-w12"))
    assert of(lab).next_numbers == {"node7-w": 13}
    again = make_lab(durable=lab.saved[-1], journal=lab.lines)
    assert "node7-w12" not in {row.worker_id for row in of(again).workers}
    assert of(again).next_numbers == {"node7-w": 13}
