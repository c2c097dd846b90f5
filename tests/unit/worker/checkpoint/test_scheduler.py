"""When one worker takes its share of a checkpoint: what its word asks for, what is agreed, and what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from craft.decide.step.combine import combine
from craft.decide.techniques.technique import Moment
from craft.protocol.control_word import MicrobatchRecord, Word
from craft.protocol.events import CheckpointAbandoned, CheckpointSkipped, CheckpointWritten
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import CheckpointWish, Directive, PreemptionOrder
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.state.serialized import State
from craft.worker.checkpoint.scheduler import CheckpointScheduler
from craft.worker.membership.client import Left, MembershipClient
from craft.worker.report.activity_page import ActivityPage
from craft.worker.state.checkpoint_target import CheckpointTarget

from ..noting import Noting

ALONE = Generation(number=1, nonce="a", members=(Member(worker_id="w0"),))
BOTH = Generation(number=1, nonce="a", members=(Member(worker_id="w0"), Member(worker_id="w1")))


class Saving:
    """A worker whose steps a test commits."""

    def __init__(self, folder: Path, every: str, under: Generation = ALONE) -> None:
        self.under = under
        self.target = CheckpointTarget.of(str(folder), every, 3, None)
        self.membership = MembershipClient("w0", "127.0.0.1", b"", lambda *_: None)
        self.reporter = Noting("w0", self.membership)
        net = torch.nn.Linear(3, 2)
        self.scheduler = CheckpointScheduler(
            self.target,
            "w0",
            self.membership,
            self.reporter,
            ActivityPage(None),
            lambda: State({"net": net}, {}, b""),
            lambda step: step // 4 if step % 4 == 3 else None,
        )

    def commit(self, step: int, leads: bool = True, busy_elsewhere: bool = False) -> bool:
        """Commit a step and do the work of the boundary after it; returns whether a checkpoint was due there."""
        part = self.scheduler.word_part(step, leads)
        record = MicrobatchRecord(microbatch=0, weight=1.0, present=b"")
        own = Word(
            step=step,
            records=(record,),
            able=True,
            save=part.save,
            wish=part.wish,
            busy=part.busy or busy_elsewhere,
            saved=part.saved,
            leave=part.leave,
        )
        words = [own, *(Word(step=step, able=True) for _ in self.under.members[1:])]
        members = self.under.worker_ids
        self.scheduler.after_commit(
            Moment(step=step, branch=0, generation=1, members=members, word=combine(words), under=self.under)
        )
        return self.scheduler.at_boundary()

    def listed(self) -> list[int]:
        self.scheduler.finish()
        return [manifest.step for manifest in candidates(self.target.tiers)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_it_is_taken_after_every_n_steps_and_complete_when_it_is_listed_P7(folder: Path) -> None:
    saving = Saving(folder, "3 steps")
    due = []
    for step in range(7):
        if saving.commit(step):
            due.append(step + 1)
            assert saving.listed()[0] == step + 1
    assert due == [3, 6]
    assert saving.scheduler.saved == (0, 6)


def test_it_is_taken_where_a_pass_over_the_data_ends(folder: Path) -> None:
    saving = Saving(folder, "2 epochs")
    taken = []
    for step in range(16):
        if saving.commit(step):
            taken.append(step + 1)
            saving.scheduler.finish()
    assert taken == [8, 16]


def test_only_the_leader_looks_at_the_clock(folder: Path) -> None:
    saving = Saving(folder, "10 min")
    saving.scheduler._last -= 601
    assert saving.scheduler.word_part(5, leads=False).save is None
    assert saving.scheduler.word_part(5, leads=True).save == ""


def test_a_wish_is_answered_once_with_its_tag(folder: Path) -> None:
    saving = Saving(folder, "1000 steps")
    wish = CheckpointWish(number=1, tag="best")
    saving.membership.direct(Directive(sequence=1, generation=ALONE, wishes=(wish,)))
    assert saving.commit(4)
    assert saving.listed() == [5]
    assert not saving.commit(5), "the directive repeats it"
    assert candidates(saving.target.tiers)[0].tag == "best"


def test_one_that_is_due_while_another_is_written_is_skipped_but_a_wish_waits(folder: Path) -> None:
    saving = Saving(folder, "2 steps")
    assert not saving.commit(1, busy_elsewhere=True)
    assert [each.step for each in saving.reporter.noted if isinstance(each, CheckpointSkipped)] == [2]
    saving.membership.direct(Directive(sequence=1, generation=ALONE, wishes=(CheckpointWish(number=1, tag="x"),)))
    assert not saving.commit(2, busy_elsewhere=True)
    assert saving.scheduler.word_part(3, leads=True).wish == 1, "it is repeated until it can be taken"
    assert saving.commit(3)
    assert saving.listed() == [4]


def test_a_member_that_is_lost_before_it_is_complete_makes_it_be_taken_again(folder: Path) -> None:
    saving = Saving(folder, "2 steps", under=BOTH)
    assert saving.commit(1)
    assert saving.listed() == [], "the other share is missing"
    assert saving.scheduler.word_part(2, leads=True).save is None
    saving.scheduler.generation_change(Moment(step=2, branch=0, generation=2, members=("w0",), lost=("w1",)))
    (abandoned,) = [each for each in saving.reporter.noted if isinstance(each, CheckpointAbandoned)]
    assert abandoned.step == 2 and "w1 was lost" in abandoned.reason
    assert saving.scheduler.word_part(2, leads=True).save == ""
    saving.under = replace(ALONE, number=2)
    assert saving.commit(2)
    assert saving.listed() == [3]
    assert saving.scheduler.word_part(4, leads=True).save is None, "once is enough"


def test_a_job_that_makes_room_takes_one_and_leaves(folder: Path) -> None:
    saving = Saving(folder, "1000 steps")
    order = PreemptionOrder(reason="maintenance")
    saving.membership.direct(Directive(sequence=1, generation=ALONE, preempting=order, saved=(0, 9)))
    with pytest.raises(Left):
        saving.commit(8)
    assert saving.membership.left and saving.listed() == [9]


def test_at_the_end_the_last_state_has_one_and_no_second_one(folder: Path) -> None:
    saving = Saving(folder, "1000 steps")
    assert not saving.commit(11)
    for _ in range(2):
        saving.scheduler.at_end(12, 0, ALONE, ("w0",))
    assert saving.listed() == [12]
    assert len([each for each in saving.reporter.emitted if isinstance(each, CheckpointWritten)]) == 1


def test_after_going_back_what_was_due_is_forgotten(folder: Path) -> None:
    saving = Saving(folder, "1000 steps")
    saving.scheduler.ask("tag", 7, 0, ALONE, ("w0",))
    saving.scheduler.went_back(1, 4)
    assert not saving.scheduler.at_boundary() and saving.scheduler.saved == (1, 4)
