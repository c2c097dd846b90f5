"""Where a job begins whose script gives ``start_step``: once all were compared, and on all who were, also if one is lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from craft.protocol.errors import ConfigError
from craft.protocol.membership import Claim, Settlement
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.participant import Participant
from craft.worker.membership.participant_links import LoopLinks

from ..alone import alone, dataset, model, train


def participant(start_step: int) -> Participant:
    found = Participant("w0", MembershipClient("w0", "127.0.0.1", b"", lambda *_: None), "redo", lambda _: None, None)
    found.begin_at(start_step)
    found.loop_begun(LoopLinks())
    return found


def test_the_step_is_taken_when_all_are_known_to_begin_together() -> None:
    own = participant(50)
    assert own.step == 0
    settlement = own.start(Settlement(step=0, commits=(), owners=(), given=()))
    assert settlement is not None and own.step == settlement.step == 50 and own.started


def test_a_checkpoint_goes_before_it() -> None:
    own = participant(50)
    own.verify_checkpoint(0, 80)
    own.go_back()
    own.start(None)
    assert own.step == 80


def test_one_whose_comparison_broke_off_is_where_those_are_who_came_through() -> None:
    own = participant(50)
    late = Claim(worker_id="w1", committed=0)
    assert own._started_at(late).committed == 50
    for claim in (replace(late, committed=None), replace(late, committed=51), replace(late, rewinds=1)):
        assert own._started_at(claim) == claim


def test_a_later_loop_begins_where_the_one_before_ended() -> None:
    own = participant(0)
    own.start(None)
    with pytest.raises(ConfigError, match="only the first training loop of a script begins elsewhere"):
        own.begin_at(7)


def test_a_job_counts_from_there_and_has_the_data_from_there() -> None:
    def numbers(start_step: int) -> dict[int, list[float]]:
        job = alone()
        net = job.replicate(model())
        found: dict[int, list[float]] = {}
        for step in job.steps(dataset(8), global_batch=2, microbatches=1, epochs=3, start_step=start_step):
            for batch in step:
                found[step.number] = batch[0][:, 0].tolist()
                train(net, batch)
        return found

    whole = numbers(0)
    assert list(whole) == list(range(12))
    assert numbers(7) == {step: whole[step] for step in range(7, 12)}
    assert numbers(12) == {}
