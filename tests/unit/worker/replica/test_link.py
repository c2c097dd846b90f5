"""The workers of a replica as threads: beats, collectives, a break, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed
from msgspec import UNSET

from craft.decide.step.beat import BeatAnswer, BeatMessage, before_microbatch
from craft.groups.gloo import GlooGroup
from craft.groups.sharded.reductions import AllReduce
from craft.groups.sharded.transfer import exchange
from craft.groups.subgroup import DirectSubgroup
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Generation, GroupProgress, Member, Slot
from craft.protocol.messages import Broken
from craft.settings.worker import WorkerSettings
from craft.worker.membership.client import MembershipClient
from craft.worker.replica.link import ReplicaLink
from craft.worker.replica.recorded_outputs import RecordedOutputs

from ..members import KEY, together

T = TypeVar("T")
dist: Any = torch.distributed


class Linked:
    """A worker of a replica of two, linked to the other one over ``group``."""

    def __init__(self, group: GlooGroup) -> None:
        self.broken: list[Broken] = []
        self.group = group
        settings = WorkerSettings(worker_id=f"w{group.rank}", position=group.rank, replica_size=group.size)
        membership = MembershipClient(settings.worker_id, "127.0.0.1", KEY, self.broken.append)
        self.link = ReplicaLink(settings, membership, RecordedOutputs(None, KEY), nullcontext)
        members = tuple(Member(worker_id=f"w{rank}", slot=Slot(0, rank)) for rank in range(group.size))
        generation = Generation(number=group.generation, nonce="x", members=members, replica_size=group.size)
        self.link.enter(generation, group, together=False)

    def sum(self, value: float, name: str = "g") -> float:
        tensor = torch.tensor([value])
        self.link.run(name, (0, 1), AllReduce(tensor, dist.ReduceOp.SUM, 2))
        return float(tensor)


def linked(act: Callable[[Linked], T]) -> list[T]:
    found = together(2, lambda group: act(Linked(group)))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found  # type: ignore[return-value]


def test_all_positions_get_the_answer_of_position_0() -> None:
    def beat(worker: Linked) -> BeatAnswer | None:
        said = BeatMessage(extra=-3) if worker.link.position == 0 else BeatMessage()
        return worker.link.beat(said, before_microbatch)

    assert linked(beat) == [BeatAnswer(go=True, confirms=True, extra=-3)] * 2


def test_a_collective_runs_in_a_microbatch_in_an_update_and_in_an_evaluation_between() -> None:
    def run(worker: Linked) -> list[object]:
        link, own = worker.link, float(worker.link.position + 1)
        link.compute(live=True)
        first = worker.sum(own)
        outside = link.progress
        link.update(0, 5, live=True, keep=False)
        second = worker.sum(own * 10)
        with link.scoring(live=True):
            third = worker.sum(own * 100)
        done = link.progress
        assert not isinstance(done, type(UNSET))
        return [first, outside, second, third, [(each.positions, each.count) for each in done]]

    assert linked(run) == [[3.0, UNSET, 30.0, 300.0, [((0, 1), 1)]]] * 2


def test_after_a_break_a_microbatch_is_echoed_and_no_beat_answers() -> None:
    """P1: nothing waits, and the worker knows that its numbers are wrong."""

    def run(worker: Linked) -> tuple[object, ...]:
        link = worker.link
        link.compute(live=True)
        if link.position == 1:
            worker.group.abort()
        found = worker.sum(5.0)
        again = worker.sum(7.0)
        return found, again, link.spoiled, link.whole, link.beat(BeatMessage(), before_microbatch)

    # Each is answered as if the other one had sent the same.
    assert linked(run) == [(10.0, 14.0, True, False, None)] * 2


def test_a_replica_that_is_not_live_takes_no_part_in_collectives_of_a_microbatch() -> None:
    def run(worker: Linked) -> tuple[float, bool]:
        worker.link.compute(live=False)
        return worker.sum(float(worker.link.position)), worker.link.spoiled

    assert linked(run) == [(0.0, True), (2.0, True)]


def test_workers_that_go_on_with_an_update_together_perform_the_rest_of_it() -> None:
    def run(worker: Linked) -> float:
        link = worker.link
        link.update(0, 5, live=False, keep=False)
        assert link._under is not None
        link.enter(link._under, worker.group, together=True)
        return worker.sum(1.0)

    assert linked(run) == [2.0, 2.0]


def test_a_collective_in_what_one_worker_runs_alone_is_refused() -> None:
    def run(worker: Linked) -> str:
        worker.link.update(0, 5, live=True, keep=False)
        with worker.link.by_one_worker("job.once('save')"), pytest.raises(ConfigError) as refused:
            worker.sum(1.0)
        return f"{refused.value} {worker.sum(1.0)}"

    for text in linked(run):
        assert "all_reduce between the workers of a replica, in job.once('save'): only one worker runs it" in text
        assert text.endswith("2.0")


def test_progress_names_the_positions_of_each_group() -> None:
    def run(worker: Linked) -> object:
        worker.link.update(0, 5, live=True, keep=False)
        worker.sum(1.0, "first")
        worker.sum(1.0, "first")
        worker.sum(1.0, "second")
        return worker.link.progress

    for progress in linked(run):
        assert isinstance(progress, tuple) and all(isinstance(each, GroupProgress) for each in progress)
        assert sorted(each.count for each in progress) == [1, 2] and len({each.group for each in progress}) == 2


def test_two_members_swap_tensors_of_any_kind_over_their_direct_connection() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]

    def swap(group: GlooGroup) -> list[torch.Tensor]:
        assert group.direct is not None
        peers = DirectSubgroup(group, group.direct, (0, 1), 8)
        found = []
        for kind in kinds:
            # Not contiguous, on both sides.
            sent = torch.full((3, 4), float(group.rank)).to(kind).t()
            received = torch.full((3, 8), 7.0).to(kind)[:, ::2].t()
            exchange(peers, [(sent, 1 - group.rank)], [(received, 1 - group.rank)])
            exchange(peers, [(sent[:0], 1 - group.rank)], [(received[:0], 1 - group.rank)], tag=1)
            found.append(received)
        return found

    for rank, found in enumerate(together(2, swap)):
        assert isinstance(found, list)
        assert all(
            torch.equal(each, torch.full((4, 3), 1.0 - rank).to(kind)) for each, kind in zip(found, kinds, strict=True)
        )
