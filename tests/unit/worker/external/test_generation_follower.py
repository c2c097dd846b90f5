"""Generations of a guest: what is aborted, what is recorded, and when a generation acts."""

from __future__ import annotations

import queue

from craft.protocol.generation_log import Entered
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Directive
from craft.worker.external.generation_follower import Change, GenerationFollower

LIMIT_S = 30.0


def directive(number: int, *worker_ids: str) -> Directive:
    members = tuple(Member(worker_id=each) for each in worker_ids)
    return Directive(sequence=number, generation=Generation(number=number, nonce="test", members=members))


class Followed:
    """w0, with all that its follower calls."""

    def __init__(self, *, starts: bool = True) -> None:
        self.reported: list[int] = []
        self.entered: queue.SimpleQueue[Entered] = queue.SimpleQueue()
        self.changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self.follower = GenerationFollower("w0", self.reported.append, self.entered.put, starts=starts)


def test_a_generation_that_grows_aborts_nothing_and_one_without_a_member_does() -> None:
    one = Followed()
    one.follower.on_change(one.changes.put)
    for number, members in enumerate((("w0",), ("w0", "w1"), ("w0",)), start=1):
        one.follower.direct(directive(number, *members))
    found = [one.entered.get(timeout=LIMIT_S) for _ in range(3)]
    assert [each.aborted is None for each in found] == [True, True, False]
    assert [each.lost for each in found] == [(), (), ("w1",)]
    assert one.changes.get(timeout=LIMIT_S).reason == "w1 is not in generation 3" and one.changes.empty()
    assert one.reported == [1, 2, 3]


def test_every_member_aborts_in_a_generation_with_the_same_members() -> None:
    one = Followed()
    one.follower.on_change(one.changes.put)
    one.follower.direct(directive(1, "w0", "w1"))
    one.follower.direct(directive(2, "w0", "w1"))
    change = one.changes.get(timeout=LIMIT_S)
    assert change.lost == () and change.reason.startswith("every member aborts")


def test_a_callback_that_fails_keeps_neither_the_others_nor_the_next_change_from_being_called() -> None:
    one = Followed()

    def fails(change: Change) -> None:
        raise RuntimeError("of another package")

    one.follower.on_change(fails)
    one.follower.on_change(one.changes.put)
    for number, members in enumerate((("w0", "w1", "w2"), ("w0", "w1"), ("w0",)), start=1):
        one.follower.direct(directive(number, *members))
    assert [one.changes.get(timeout=LIMIT_S).lost for _ in range(2)] == [("w2",), ("w1",)]


def test_a_step_acts_under_the_generation_before_until_its_abort_is_done() -> None:
    """Without its thread, the follower never comes to abort."""
    one = Followed(starts=False)
    one.follower.direct(directive(1, "w0"))
    current = one.follower.current
    assert current is not None and current.number == 1
    assert one.follower.advance(1) == (None, []) and one.follower.steps == 1


def test_what_was_entered_is_handed_to_one_step_only() -> None:
    one = Followed()
    one.follower.direct(directive(1, "w0"))
    assert one.follower.await_slot()
    acting, entered = one.follower.advance(1)
    assert acting is not None and [each.generation for each in entered] == [1]
    assert one.follower.advance(2) == (acting, [])


def test_an_old_generation_or_one_without_this_worker_changes_nothing() -> None:
    one = Followed(starts=False)
    for each in (directive(2, "w0"), directive(1, "w0"), directive(3, "w1")):
        one.follower.direct(each)
    assert one.reported == [2]
    assert one.follower.leaving == "it was told to leave" and one.follower.leaves_alone
