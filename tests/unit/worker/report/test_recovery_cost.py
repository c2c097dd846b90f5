"""What a loss cost is told by one member, and by the next one if that one may not have been heard."""

from __future__ import annotations

import pytest

from craft.protocol.events import Recovered
from craft.protocol.generation_log import Entered
from craft.worker.report.recovery_cost import RecoveryCosts


class Worker:
    """One worker's count, and what it told."""

    def __init__(self, worker_id: str) -> None:
        self.told: list[Recovered] = []
        self.setbacks = RecoveryCosts(worker_id, self.told.append, lambda step, microbatch: 2)

    def enter(self, generation: int, *members: str, lost: tuple[str, ...] = (), agreed: bool = False) -> None:
        self.setbacks.settled(
            Entered(
                generation=generation, time=0.0, told=0.0, aborted=None, met=0.0, entered=0.0, agreed=agreed,
                members=members, lost=lost, joiners=(), idle=(), step=5, commits=False, retried=True, given=(1,), mine=(),
                dropped=(),
            )
        )  # fmt: skip

    def commit(self, generation: int, elapsed_s: float = 1.0) -> None:
        self.setbacks.committed(5, generation, elapsed_s, 100.0)


def test_steps_without_a_setback_are_not_told_of() -> None:
    worker = Worker("w0")
    worker.enter(1, "w0", "w1", agreed=True)
    worker.commit(1)
    worker.enter(2, "w0", "w1", "w2", agreed=True)
    worker.commit(2)

    assert worker.told == []


def test_the_first_member_tells_what_a_loss_cost_once_a_step_is_committed() -> None:
    first, second = Worker("w0"), Worker("w2")
    for worker in (first, second):
        worker.commit(1)
        worker.enter(2, "w0", "w2", lost=("w1",))
        assert worker.told == []
        worker.commit(2, elapsed_s=1.25)
        worker.commit(2)

    (found,) = first.told
    assert second.told == []
    assert (found.worker_id, found.since, found.generation, found.step) == ("w0", 1, 2, 5)
    assert found.lost_s == pytest.approx(0.25)
    assert (found.redone, found.redone_samples, found.committed_at) == ((1,), 2, 100.0)


def test_if_the_teller_is_lost_next_its_successor_tells_both() -> None:
    worker = Worker("w2")
    worker.commit(1)
    worker.enter(2, "w0", "w2", lost=("w1",))
    worker.commit(2)
    assert worker.told == []

    worker.enter(3, "w2", lost=("w0",))
    worker.commit(3)

    assert [(each.generation, each.lost) for each in worker.told] == [(2, ("w1",)), (3, ("w0",))]


def test_before_the_first_commit_nobody_knows_how_long_a_step_takes() -> None:
    worker = Worker("w0")
    worker.enter(2, "w0", lost=("w1",))
    worker.commit(2, elapsed_s=7.0)

    (found,) = worker.told
    assert (found.since, found.lost_s) == (0, None)


def test_a_slow_first_step_does_not_hide_what_a_loss_costs() -> None:
    worker = Worker("w0")
    for elapsed_s in (60.0, 1.0, 1.0):
        worker.commit(1, elapsed_s)
    worker.enter(2, "w0", lost=("w1",))
    worker.commit(2, elapsed_s=3.0)

    assert worker.told[0].lost_s == pytest.approx(2.0)
