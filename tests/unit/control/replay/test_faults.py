"""What workers tell of a loss that they overcame becomes its cost: in the journal, in the status, over restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from craft.control.replay.faults import Cost, Fault, FaultBook, costed
from craft.protocol.events import CheckpointWritten, Recovered
from craft.protocol.messages import Exited, WorkerReport

if TYPE_CHECKING:
    from tests.unit.control.conftest import Lab

Report = Callable[..., WorkerReport]


def recovered(generation: int, *lost: str, since: int = 1, by: str = "w0", **more: Any) -> Recovered:
    given = {"lost_s": 0.0431, "retried": (11,), "redone": (2, 3), "redone_samples": 8, "dropped_samples": 0}
    return Recovered(worker_id=by, generation=generation, since=since, lost=lost, step=11, **{**given, **more})


def replayed(lines: Iterable[dict[str, Any]]) -> tuple[Fault, ...]:
    book = FaultBook()
    for line in lines:
        book(line)
    return book.faults


def costs(lab: Lab) -> list[Cost]:
    return [msgspec.convert(line, Cost) for line in lab.lines if line.get("outcome") == "Cost"]


def test_a_loss_has_its_cost_once_a_step_is_committed_again(
    running: Lab, worker: Report, dead: Callable[..., Exited]
) -> None:
    running.report(worker("w0", generation=1), worker("w1", generation=1), exited=(dead("w1"),))
    assert [fault.cost for fault in running.loop.faults] == [None]

    running.report(worker("w0", generation=2, notes=(recovered(2, "w1"),)))

    (cost,) = costs(running)
    assert (cost.worker_ids, cost.generation, cost.lost_ms) == (("w1",), 2, 43.1)
    assert (cost.steps_retried, cost.microbatches_redone, cost.samples_redone) == (1, 2, 8)
    assert [fault.cost for fault in running.loop.faults] == [cost]


def test_what_several_members_tell_of_one_recovery_counts_once(
    running: Lab, worker: Report, dead: Callable[..., Exited]
) -> None:
    running.report(worker("w0", generation=1), worker("w1", generation=1), exited=(dead("w1"),))
    running.report(worker("w0", generation=2, notes=(recovered(2, "w1"),)))
    running.report(worker("w0", generation=2, notes=(recovered(2, "w1"), recovered(2, "w1", by="w3", lost_s=0.05))))

    assert len(costs(running)) == 1


def test_losses_that_are_overcome_together_share_their_cost(make_lab: type[Lab], worker: Report, dead: Any) -> None:
    lab = make_lab(slots=3)
    names = ("w0", "w1", "w2")
    lab.report(*(worker(name) for name in names))
    lab.report(*(worker(name, generation=1) for name in names))
    lab.report(*(worker(name, generation=1) for name in names), exited=(dead("w1"),))
    lab.report(*(worker(name, generation=1) for name in names), exited=(dead("w1"), dead("w2")))
    lab.report(worker("w0", generation=3, notes=(recovered(3, "w1", "w2"),)))

    (cost,) = costs(lab)
    assert cost.worker_ids == ("w1", "w2")
    assert [fault.cost for fault in lab.loop.faults] == [cost, cost]


def test_a_broken_exchange_costs_something_though_nobody_was_lost(running: Lab, worker: Report) -> None:
    running.report(worker("w0", generation=2, notes=(recovered(2),)))

    assert [cost.worker_ids for cost in costs(running)] == [()]


def test_a_spare_that_is_lost_costs_nothing_and_takes_no_share_of_what_others_cost(
    make_lab: type[Lab], worker: Report, dead: Any
) -> None:
    lab = make_lab(slots=2)
    everybody = (worker("w0", generation=1), worker("w1", generation=1), worker("w2"))
    lab.report(worker("w0"), worker("w1"))
    lab.report(*everybody)
    lab.report(*everybody, exited=(dead("w2"),))
    lab.report(*everybody, exited=(dead("w2"), dead("w1")))
    lab.report(worker("w0", generation=2, notes=(recovered(2, "w1"),)), exited=(dead("w2"), dead("w1")))

    assert [(fault.worker_ids, fault.cost is not None) for fault in lab.loop.faults] == [
        (("w2",), False),
        (("w1",), True),
    ]


def test_a_job_that_began_again_puts_no_cost_on_what_was_lost_before(lab: Lab, worker: Report, dead: Any) -> None:
    written = CheckpointWritten(name="c", branch=0, step=10, url="u")
    both = [worker(name, generation=1, step=12, notes=(written,)) for name in ("w0", "w1")]
    lab.report(worker("w0"), worker("w1"))
    lab.report(*both)
    ends = [dead("w0"), dead("w1")]
    lab.report(*both, exited=tuple(ends))
    lab.report(worker("w2"), worker("w3"), exited=tuple(ends))
    assert lab.names("action")[-2:] == ["Restore", "Reconfigure"]
    # Before they commit anything, one of them is lost: the other knows of no commit before.
    ends.append(dead("w3"))
    lab.report(worker("w2", generation=lab.generation), worker("w3", generation=lab.generation), exited=tuple(ends))
    told = recovered(lab.generation, "w3", since=0, by="w2", lost_s=None)
    lab.report(worker("w2", generation=lab.generation, notes=(told,)), exited=tuple(ends))

    assert [cost.worker_ids for cost in costs(lab)] == [("w3",)]
    assert [fault.cost is not None for fault in lab.loop.faults] == [False, False, True]
    assert replayed(lab.lines) == lab.loop.faults


def test_a_restarted_lighthouse_knows_the_costs_from_the_journal(
    running: Lab, worker: Report, dead: Callable[..., Exited]
) -> None:
    running.report(worker("w0", generation=1), worker("w1", generation=1), exited=(dead("w1"),))
    running.report(worker("w0", generation=2, notes=(recovered(2, "w1"),)))

    assert replayed(running.lines) == running.loop.faults
    # Told again by another member, whatever its clock says, it is old news.
    assert costed(running.loop.faults, recovered(2, "w1", by="w5"))[0] == running.loop.faults
