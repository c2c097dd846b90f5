"""How blocks travel between members: whatever the way, every rank gets the mean that the tree gives, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from craft.decide.step.plan import plan, share_of
from craft.decide.step.topology import between_by_host, between_flat, host_first, spread_of
from craft.decide.step.tree import cover
from craft.groups.gloo import GlooGroup
from craft.groups.group import P2P, Pending
from craft.protocol.control_word import MicrobatchRecord, Word
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.routes.direct import DirectRoute
from craft.worker.reduce.routes.flat import FlatRoute, sum_into, word_bytes
from craft.worker.reduce.routes.hierarchical import HierarchicalRoute, Move

from ...blocks import held, layout_of, mean, no_buffers, node_of
from ...members import together

BUFFER = torch.arange(300, dtype=torch.uint8)
BLOCK_TAGS = 64
"""Blocks and results have tags from here on; words, buffers and acknowledgements lower ones."""


class Counting:
    """A group that counts the bytes of gradients that go from one host to another."""

    def __init__(self, group: GlooGroup, hosts: Sequence[str]) -> None:
        self._group = group
        self._hosts = hosts
        self.generation, self.rank, self.size = group.generation, group.rank, group.size
        self.between: Counter[str] = Counter()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        if self._hosts[peer] != self._hosts[self.rank]:
            kind = "gradients" if tag >= BLOCK_TAGS else "rest"
            self.between[kind] += tensor.numel() * tensor.element_size()
        return self._group.send(tensor, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def route_for(
    group: P2P, layout: BucketLayout, owners: Sequence[int], hosts: Sequence[str], by_host: bool
) -> FlatRoute:
    size = word_bytes(owners, len(hosts), len(layout.params))
    if by_host:
        return HierarchicalRoute(group, layout, owners, size, spread_of(hosts))
    return FlatRoute(group, layout, owners, size)


def exchanged(
    hosts: Sequence[str],
    owners: Sequence[int],
    sizes: Sequence[int] = (70, 33, 200),
    bucket_bytes: int = 300,
    *,
    by_host: bool,
    direct: bool = False,
    steps: int = 2,
) -> Counter[str]:
    """Exchange some steps between real members, and check what each of them got; returns the bytes between hosts per step."""

    def act(group: GlooGroup) -> Counter[str]:
        layout = layout_of(sizes, bucket_bytes)
        counting = Counting(group, hosts)
        route = route_for(counting, layout, owners, hosts, by_host)
        if direct:
            assert group.direct is not None
            route = DirectRoute(counting, group.direct, layout, owners)
        gradients, result = held(layout, owners, group.rank), Flats(layout)
        before = {node: [flat.clone() for flat in flats.tensors] for node, flats in gradients.nodes.items()}
        first = owners[0] if owners else -1
        for step in range(steps):
            for flat in result.tensors:
                flat.fill_(float("nan"))
            attempt = Attempt(step, counting, route, gradients, result, lambda _: torch.zeros_like(BUFFER))
            attempt.buffers = BUFFER if group.rank == first else None
            for bucket in range(len(layout.buckets) - 1):
                # As the exchange thread would while backward goes on, on some of the members.
                if group.rank % 2:
                    attempt.overlap(bucket)
            records = tuple(
                MicrobatchRecord(microbatch=each, weight=1.0, present=b"\7") for each in share_of(owners, group.rank)
            )
            word = partial(Word, step=step, records=records, ready=1, buffers=(0,) if group.rank == first else ())
            assert attempt.finish(word), attempt.error
            assert attempt.combined is not None and attempt.combined.step == step
            if first >= 0:
                assert attempt.buffers is not None and torch.equal(attempt.buffers, BUFFER)
            for bucket, flat in enumerate(result.tensors):
                assert torch.equal(flat, mean(owners, bucket, flat.numel())), (group.rank, bucket)
        for node, flats in gradients.nodes.items():
            assert all(map(torch.equal, flats.tensors, before[node])), "an input was overwritten"
        return Counter({kind: count // steps for kind, count in counting.between.items()})

    total: Counter[str] = Counter()
    for each in together(len(hosts), act):
        assert isinstance(each, Counter), each
        total += each
    return total


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    """Members on some hosts, in any order of ranks, and any plan: some have nothing to compute, some microbatches nobody has."""
    size = draw(st.integers(2, 6))
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    owners = draw(st.lists(st.integers(-1, size - 1), min_size=1, max_size=9))
    return hosts, owners


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    job=jobs(),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    bucket_bytes=st.sampled_from([1, 400, 1 << 20]),
)
def test_within_hosts_first_every_rank_gets_the_bits_of_the_tree_P1(
    job: tuple[list[str], list[int]], sizes: list[int], bucket_bytes: int
) -> None:
    exchanged(*job, sizes, bucket_bytes, by_host=True)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(job=jobs())
def test_straight_to_the_owners_every_rank_gets_the_bits_of_the_tree_P1(job: tuple[list[str], list[int]]) -> None:
    exchanged(*job, by_host=False)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    owners=st.lists(st.integers(-1, 1), min_size=1, max_size=9),
    sizes=st.lists(st.integers(1, 150), min_size=0, max_size=4),
    bucket_bytes=st.sampled_from([1, 400, 1 << 20]),
)
def test_by_the_direct_connection_both_get_the_bits_of_the_tree_P1(
    owners: list[int], sizes: list[int], bucket_bytes: int
) -> None:
    exchanged("ab", owners, sizes, bucket_bytes, by_host=False, direct=True)


@pytest.mark.parametrize("sizes", [(1 << 19,), (600_000,), (5, 600_000)], ids=["2 MiB", "more", "more, in two buckets"])
def test_large_blocks_and_their_words_both_arrive_P1(sizes: tuple[int, ...]) -> None:
    """Blocks above a limit leave the direct connection to the words."""
    exchanged("ab", plan(4, 2), sizes, 1 << 22 if len(sizes) == 1 else 1, by_host=False, direct=True)


@settings(deadline=None)
@given(owners=st.lists(st.integers(0, 4), min_size=1, max_size=12), place=st.integers(0, 11))
def test_a_sum_over_one_of_its_parts_has_the_bits_of_a_sum_beside_them_P1(owners: list[int], place: int) -> None:
    """As where the result takes the place of what was sent."""
    nodes = [node for rank in range(5) for node in cover(share_of(owners, rank), len(owners))]
    parts = {node: node_of(node, 0, 37, len(owners)) for node in nodes}
    others = {node: part.clone() for node, part in parts.items()}
    out = parts[nodes[place % len(nodes)]]

    expected = sum_into(torch.empty(37), others, len(owners))

    assert torch.equal(sum_into(out[:], parts, len(owners)), expected)
    assert all(torch.equal(parts[node], others[node]) for node in nodes if parts[node] is not out)


@pytest.mark.parametrize("hosts", ["aabb", "aaabbb", "aabbcc"])
def test_within_hosts_first_far_fewer_bytes_go_between_hosts(hosts: str) -> None:
    """What was counted is what the choice was made by."""
    sizes = (12 * 1024,)
    owners = plan(2 * len(hosts), len(hosts))
    spread = spread_of(hosts)
    flat = exchanged(hosts, owners, sizes, by_host=False)
    by_host = exchanged(hosts, owners, sizes, by_host=True)

    assert host_first(hosts, owners) == spread
    assert flat["gradients"] == 4 * sizes[0] * between_flat(spread, owners)
    assert by_host["gradients"] == 4 * sizes[0] * between_by_host(spread, owners)
    assert flat["gradients"] / by_host["gradients"] >= 2
    assert by_host["rest"] <= flat["rest"]


@settings(max_examples=100, deadline=None)
@given(job=jobs(), sizes=st.lists(st.integers(1, 150), min_size=1, max_size=3))
def test_within_hosts_first_what_one_sends_is_in_the_order_in_which_the_other_expects_it(
    job: tuple[list[str], list[int]], sizes: list[int]
) -> None:
    """Where messages have no tags, as between devices, they are told apart by their order alone."""
    hosts, owners = job
    routes = [_unconnected(rank, hosts, owners, layout_of(sizes, 400)) for rank in range(len(hosts))]
    for part in ("block", "node", "piece", "slice"):
        for one, sender in enumerate(routes):
            for other, receiver in enumerate(routes):
                sent = [_shape(move) for move in _moves(sender, part, "sends", owners) if move[1] == other]
                expected = [_shape(move) for move in _moves(receiver, part, "receives", owners) if move[1] == one]
                assert sent == expected, (part, one, other)


class _Nobody:
    """A place in a group that nobody sends through."""

    generation = 1

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _unconnected(rank: int, hosts: Sequence[str], owners: Sequence[int], layout: BucketLayout) -> HierarchicalRoute:
    route = route_for(cast(P2P, _Nobody(rank, len(hosts))), layout, owners, hosts, by_host=True)
    assert isinstance(route, HierarchicalRoute)
    return route


def _moves(route: HierarchicalRoute, part: str, way: str, owners: Sequence[int]) -> list[Move]:
    layout, result = route._layout, Flats(route._layout).tensors
    gradients = held(layout, owners, route._rank)
    found: list[Move] = []
    for bucket in range(len(layout.buckets)):
        given: list[Any] = [] if part in ("block", "node") and way == "receives" else [result[bucket]]
        if (part, way) == ("block", "sends"):
            given = [gradients]
        if (part, way) == ("node", "sends"):
            given = [route.sum_blocks(bucket, gradients)]
        found += getattr(route, f"{part}_{way}")(bucket, *given)
    return found


def _shape(move: Move) -> tuple[int, int]:
    return move[0].numel(), move[2]


def test_a_member_that_is_lost_in_the_exchange_frees_all_others() -> None:
    """Whoever waits for it, or for one that waits for it, comes out once the group is aborted."""
    hosts, owners = "aabb", plan(4, 4)

    def act(group: GlooGroup) -> bool:
        layout = layout_of((70, 33), 1)
        route = route_for(group, layout, owners, hosts, by_host=True)
        attempt = Attempt(0, group, route, held(layout, owners, group.rank), Flats(layout), no_buffers)
        if group.rank == 3:
            group.abort()
            return False
        committed = attempt.finish(lambda: Word(step=0, ready=1))
        # As each does that hears of the new generation.
        group.abort()
        return committed

    assert together(4, act) == [False] * 4
