"""How groups open: on a thread, between real connections, and how each is given up again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from craft.groups.gloo import GlooGroup
from craft.groups.rendezvous import RendezvousStore
from craft.protocol.errors import GroupBroken, GroupError, GroupTimeout
from craft.protocol.membership import Generation, Member, Slot
from craft.protocol.messages import Broken
from craft.worker.membership.group_opening import GroupOpener, OpeningGroup

from ..crew import wait_for
from ..members import KEY, LIMIT_S


class Opening:
    """The openers of two workers, as their membership clients use them."""

    def __init__(self) -> None:
        self.reports: list[Broken] = []
        self.broke: list[tuple[int, Exception]] = []
        self._stores = [RendezvousStore("127.0.0.1", KEY) for _ in range(2)]
        self.openers = [self._opener(f"w{rank}") for rank in range(2)]

    def _opener(self, worker_id: str) -> GroupOpener:
        opener = GroupOpener(
            worker_id,
            "127.0.0.1",
            KEY,
            threading.Condition(),
            self.reports.append,
            lambda number, error: self.broke.append((number, error)),
        )
        with opener._change:
            opener.equip(None)
        return opener

    def generation(self, number: int) -> Generation:
        members = tuple(Member(worker_id=f"w{rank}", store_port=store.port) for rank, store in enumerate(self._stores))
        return Generation(number=number, nonce=f"opening{id(self)}", members=members)

    def one_replica(self, number: int) -> Generation:
        """Return a generation in which both hold one copy of the model together."""
        whole = self.generation(number)
        members = tuple(replace(member, slot=Slot(0, rank)) for rank, member in enumerate(whole.members))
        return replace(whole, members=members, replica_size=2)

    def move(self, number: int, *, one_replica: bool = False) -> list[OpeningGroup]:
        generation = self.one_replica(number) if one_replica else self.generation(number)
        for opener in self.openers:
            with opener._change:
                opener.move(generation)
        return self.wait([opener.current for opener in self.openers])

    def prepare(self, number: int) -> list[OpeningGroup]:
        for opener in self.openers:
            opener.upcoming = opener.begin(self.generation(number))
        return self.wait([opener.upcoming for opener in self.openers])

    def wait(self, places: list[OpeningGroup | None]) -> list[OpeningGroup]:
        found = [place for place in places if place is not None]
        wait_for(lambda: all(place.opened for place in found), "the groups open")
        return found


@pytest.fixture
def opening() -> Iterator[Opening]:
    found = Opening()
    yield found
    for opener in found.openers:
        opener.abandon()


def summed(places: list[OpeningGroup]) -> list[float]:
    """What each member gets if all add up their ranks plus one."""
    tensors = [torch.tensor([rank + 1.0]) for rank in range(len(places))]
    works = []
    for place, tensor in zip(places, tensors, strict=True):
        assert place.group is not None
        works.append(place.group.all_reduce(tensor))
    for work in works:
        work.wait()
    return [float(tensor) for tensor in tensors]


def test_a_generation_of_one_is_open_at_once() -> None:
    place = Opening().openers[0].begin(Generation(number=1, nonce="", members=(Member(worker_id="w0"),)))
    assert place.opened and place.group is None


def test_members_meet_and_exchange(opening: Opening) -> None:
    places = opening.move(1)
    assert summed(places) == [3.0, 3.0]
    assert [opener.number for opener in opening.openers] == [1, 1]
    assert all(place.moments.aborted is None for place in places), "there was none to abort"


def test_a_group_waits_for_the_device_of_the_model(opening: Opening) -> None:
    for opener in opening.openers:
        opener.equipped = False
        opener.current = opener.begin(opening.generation(1))
    places = [opener.current for opener in opening.openers]
    wait_for(lambda: all(place is not None and place.group is not None for place in places), "they are connected")
    assert not any(place is not None and place.opened for place in places)
    for opener in opening.openers:
        with opener._change:
            opener.equip(None)
    assert summed(opening.wait(places)) == [3.0, 3.0]


def test_a_newer_generation_unblocks_a_member_of_the_old_one(opening: Opening) -> None:
    first = opening.move(1)[0].group
    assert first is not None
    errors: list[GroupError] = []

    def blocked() -> None:
        try:
            first.recv(torch.zeros(1), 1, 5).wait()
        except GroupError as error:
            errors.append(error)

    thread = threading.Thread(target=blocked, daemon=True)
    thread.start()
    places = opening.move(2)
    thread.join(LIMIT_S)
    assert len(errors) == 1, "nothing was ever sent: only the abort can end it"
    assert summed(places) == [3.0, 3.0] and all(place.moments.aborted is not None for place in places)


def test_a_group_entered_at_a_boundary_leaves_the_old_one_usable_until_it_is_settled(opening: Opening) -> None:
    """P3: a member that is a step behind still reads there what was sent."""
    old, new = opening.move(1), opening.prepare(2)
    for opener in opening.openers:
        with opener._change:
            opener.follow()
    assert [opener.current for opener in opening.openers] == new and not any(place.abandoned for place in old)
    assert summed(old) == summed(new) == [3.0, 3.0]
    for opener, place in zip(opening.openers, old, strict=True):
        assert opener.left_behind == [place]


def test_a_report_names_the_members_that_broke_it(opening: Opening) -> None:
    opening.move(4)
    opener = opening.openers[0]
    assert opener.broke(4, GroupBroken("reset", 4, peer=1)).missed == ("w1",)
    assert opener.broke(4, GroupTimeout("late", 4, missed=("w0",))).missed == ("w0",)
    assert opener.broke(3, GroupBroken("reset", 3, peer=1)).missed == (), "of a generation that is gone"


def test_members_that_can_be_reached_are_not_blamed_and_a_probe_is_made_once(opening: Opening) -> None:
    opening.move(1)
    for _ in range(3):
        opening.openers[0].probe(1)
    wait_for(lambda: bool(opening.reports), "the probe reports")
    (report,) = opening.reports
    assert report.generation == 1 and not report.unreachable and "every member can be reached" in report.detail


def test_two_members_of_a_job_or_of_a_replica_have_a_direct_connection(opening: Opening) -> None:
    whole = opening.move(1)
    sharded = opening.move(2, one_replica=True)

    assert [_has_direct(place.group) for place in whole] == [True, True]
    # Between replicas of sharded models blocks travel between twins, and words between all.
    assert [_has_direct(place.group) for place in sharded] == [False, False]
    assert [_has_direct(place.inner) for place in sharded] == [True, True]


def _has_direct(group: object) -> bool:
    assert isinstance(group, GlooGroup)
    return group.direct is not None
