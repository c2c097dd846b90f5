"""Workers that are to leave by a certain time, as their lighthouse sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from craft.decide.job.observe import drains
from craft.protocol.events import DrainRequested
from craft.protocol.messages import WorkerReport

if TYPE_CHECKING:
    from tests.unit.control.conftest import Lab

MakeWorker = Callable[..., WorkerReport]


def lost(lab: Lab) -> bool:
    view = lab.loop.state.view("w1")
    return view is not None and view.standing == "lost"


@pytest.mark.parametrize("first", [None, 100.0])
def test_who_leaves_already_can_be_given_less_time(running: Lab, first: float | None) -> None:
    running.loop.handle(DrainRequested(worker_id="w1", deadline_s=first))
    sooner = DrainRequested(worker_id="w1", deadline_s=5.0)
    assert drains(running.loop.state, sooner, running.now())
    running.loop.handle(sooner)
    running.pass_s(4.9)
    assert not lost(running)
    running.pass_s(0.2)
    assert lost(running)


def test_who_leaves_already_is_not_given_more_time(running: Lab) -> None:
    running.loop.handle(DrainRequested(worker_id="w1", deadline_s=5.0))
    running.pass_s(2.0)
    for again in (None, 5.0, 100.0):
        assert not drains(running.loop.state, DrainRequested(worker_id="w1", deadline_s=again), running.now())
    running.loop.handle(DrainRequested(host="a", deadline_s=100.0))
    running.pass_s(3.1)
    assert lost(running)


def test_a_restarted_lighthouse_keeps_the_deadline(running: Lab, make_lab: type[Lab], worker: MakeWorker) -> None:
    running.loop.handle(DrainRequested(worker_id="w1", deadline_s=5.0))
    again = make_lab(durable=running.saved[-1])
    again.report(worker("w0", generation=1), worker("w1", generation=1))
    again.pass_s(4.9)
    assert not lost(again)
    again.pass_s(0.2)
    assert lost(again)


def test_a_deadline_that_passed_while_no_lighthouse_was_there_waits_for_the_word_of_the_agents(
    running: Lab, make_lab: type[Lab], worker: MakeWorker
) -> None:
    running.loop.handle(DrainRequested(worker_id="w1", deadline_s=0.0))
    again = make_lab(durable=running.saved[-1])
    again.pass_s(1.0)
    again.report(worker("w0", generation=2), worker("w1", generation=1, left=True))
    again.pass_s(1.0)
    assert "DrainExpired" not in again.names()
    assert again.loop.state.members == ("w0",)
