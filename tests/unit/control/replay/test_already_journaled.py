"""A lighthouse that is started again: what workers and agents repeat is known from the journal, and is no news."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from craft.control.core.persistence import durable_of
from craft.protocol.events import (
    CheckpointWritten,
    ParametersUnequal,
    Recovered,
    StateDiverged,
    StepRetried,
    WorkerFailed,
    WorkerOverdue,
)
from craft.protocol.membership import Member
from craft.protocol.messages import Exited, HostReport, WorkerReport

from ..conftest import dead, worker

if TYPE_CHECKING:
    from ..conftest import Lab

FAILED = WorkerFailed(worker_id="w2", error="ValueError: no", traceback="...", late=True, time=5.0)
STOPPED = WorkerOverdue(worker_id="w2", phase="stopped", step=0, elapsed_s=0.6, limit_s=0.5, detail="stopped")
SLOW = WorkerOverdue(worker_id="w0", phase="updating", step=3, elapsed_s=9.0, limit_s=5.0, detail="updating for 9 s")
WRITTEN = CheckpointWritten(name="c4", branch=0, step=4, url="store", seconds=0.25)
OVERCOME = Recovered(worker_id="w0", generation=2, since=1, lost=("w1",), step=3, lost_s=0.125)


def host(*workers: WorkerReport, exited: tuple[Exited, ...] = (), **more: object) -> HostReport:
    return HostReport(host="a", pid=1, sequence=0, workers=workers, exited=exited, **more)  # type: ignore[arg-type]


def both(**more: object) -> tuple[WorkerReport, WorkerReport]:
    """Two members, of which the first has something to say."""
    return worker("w0", generation=1, step=3, **more), worker("w1", generation=1, step=3)  # type: ignore[arg-type]


SPARE = worker("w2")

REPORTS: dict[str, tuple[HostReport, ...]] = {
    "entries and joins": (host(*both(), SPARE),),
    "a note": (host(*both(notes=(WRITTEN,))),),
    "microbatches that were redone": (
        host(*both(), exited=(dead("w1"),)),
        host(
            worker(
                "w0", generation=2, step=3, retried=StepRetried(generation=2, step=3, given=(1,)), notes=(OVERCOME,)
            ),
            exited=(dead("w1"),),
        ),
    ),
    "unequal parameters": (host(*both(unequal=ParametersUnequal(worker_ids=("w1",), source="w0", first="bias"))),),
    "a divergence": (host(*both(diverged=StateDiverged(step=3, detail="bias", worker_ids=("w1",)))),),
    "a state that is gone": (host(*both(state_gone=1)),),
    "a broken exchange": (host(*both(broken=1)),),
    "a finding": (host(*both(overdue=SLOW)),),
    "no more replacements": (host(*both(), exhausted="enough is enough"),),
    "a lost member": (host(*both(), exited=(dead("w1"),)),),
    "a lost spare": (host(*both(), SPARE), host(*both(), SPARE, exited=(dead("w2"),))),
    "a lost spare that was stopped": (
        host(*both(), SPARE),
        host(*both(), worker("w2", overdue=STOPPED)),
        host(*both(), SPARE, exited=(dead("w2"),)),
    ),
    "a spare that failed": (
        host(*both(), SPARE),
        host(*both(), worker("w2", failed=FAILED)),
        host(*both(), worker("w2", failed=FAILED), exited=(dead("w2", signal=None, exit_code=1),)),
    ),
    "a member that failed": (
        host(*both(failed=WorkerFailed(worker_id="w0", error="ValueError: no", traceback="...", step=3, time=5.0))),
    ),
    "one that never joined": (host(*both(), exited=(dead("w9"),)),),
    "the end": (
        host(
            worker("w0", generation=1, step=9, complete=True, digest="d"),
            worker("w1", generation=1, step=9, complete=True, digest="d"),
            exited=(dead("w0", signal=None, exit_code=0),),
        ),
    ),
}


def again(lab: Lab, make_lab: Callable[..., Lab]) -> Lab:
    """The lighthouse after that of ``lab``, which was killed."""
    following = make_lab(durable=lab.saved[-1], journal=lab.lines)
    # Each begins with what all before it left.
    following.lines = list(lab.lines)
    following.saved = lab.saved[-1:]
    return following


def hear(lab: Lab, *reports: HostReport) -> None:
    for report in reports:
        lab.loop.handle_report(report)


@pytest.mark.parametrize("name", REPORTS)
def test_what_is_repeated_is_journaled_once_over_all_restarts(
    running: Lab, make_lab: Callable[..., Lab], name: str
) -> None:
    hear(running, *REPORTS[name])
    lab = running
    for _ in range(2):
        lab = again(lab, make_lab)
        hear(lab, REPORTS[name][-1], REPORTS[name][-1])

        # What broke is looked at again after a while.
        assert [line for line in lab.lines[len(running.lines) :] if line.get("action") != "Watch"] == []
        assert lab.loop.faults == running.loop.faults


@pytest.mark.parametrize("name", ["a lost member", "a divergence", "a state that is gone", "a member that failed"])
def test_what_was_journaled_and_not_yet_answered_is_answered(
    running: Lab, make_lab: Callable[..., Lab], name: str
) -> None:
    """The lighthouse was killed between the two."""
    before, lines = running.saved[-1], list(running.lines)
    hear(running, *REPORTS[name])
    journaled = running.lines[len(lines)]
    lab = make_lab(durable=before, journal=[*lines, journaled])
    hear(lab, *REPORTS[name])

    assert lab.names() == []
    assert lab.names("action")
    assert lab.loop.faults == running.loop.faults


def test_one_that_ended_while_nobody_listened_takes_no_slot(running: Lab, make_lab: Callable[..., Lab]) -> None:
    running.report(*both(), exited=(dead("w1"),))
    lab = again(running, make_lab)
    lab.report(worker("w0", generation=2, step=3), worker("w2"), exited=(dead("w1"), dead("w2")))

    assert lab.names("action") == running.names("action")
    assert [fault.worker_ids for fault in lab.loop.faults] == [("w1",), ("w2",)]


def test_workers_that_were_lost_with_their_host_are_not_lost_once_more(
    running: Lab, make_lab: Callable[..., Lab]
) -> None:
    away = HostReport(
        host="b", pid=2, sequence=0, workers=(WorkerReport(member=Member(worker_id="w2"), pid=9, joined=True),)
    )
    hear(running, away)
    running.loop.lose_host("b", "silent")
    lab = again(running, make_lab)
    hear(lab, HostReport(host="b", pid=2, sequence=1, workers=away.workers, exited=(dead("w2"),)))

    assert lab.lines == running.lines
    assert [fault.worker_ids for fault in lab.loop.faults] == [("w2",)]


def test_what_was_not_told_before_is_news(running: Lab, make_lab: Callable[..., Lab]) -> None:
    hear(running, host(*both(), SPARE))
    lab = again(running, make_lab)
    known = len(running.lines)
    hear(lab, host(*both(retried=StepRetried(generation=1, step=3, given=(0,))), SPARE, exited=(dead("w2"),)))

    assert [line.get("event") for line in lab.lines[known:]] == ["StepRetried", "WorkerLost", None]
    assert durable_of(lab.loop.state).generation == running.loop.state.generation
