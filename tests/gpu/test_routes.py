"""Ways between devices: the bits of the tree on every rank, fewer bytes between hosts, and what was sent is held as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
import torch
from tests.unit.groups.cast import LIMIT_S, Cast
from tests.unit.groups.test_gloo import opened
from tests.unit.worker.blocks import held, mean, no_buffers

from craft.decide.step.gradient_memory import Hold
from craft.decide.step.plan import plan, share_of
from craft.decide.step.topology import between_by_host, between_flat, spread_of
from craft.groups.nccl import NcclGroup
from craft.protocol.control_word import MicrobatchRecord, Word
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.routes.flat import word_bytes
from craft.worker.reduce.routes.flat_cuda import FlatCudaRoute, HostRoute, Streamed
from craft.worker.reduce.routes.hierarchical_cuda import HierarchicalCudaRoute

SIZES = (12 * 1024, 6 * 1024)
BUCKET_BYTES = 1 << 15
HOSTS = "aabb"


@pytest.fixture
def cast(stage: None) -> Iterator[Cast]:
    cast = Cast(device="cuda:0")
    yield cast
    cast.end()


def route_of(way: str, group: NcclGroup, layout: BucketLayout, owners: Sequence[int]) -> Streamed:
    size = word_bytes(owners, group.size, len(layout.params))
    if way == "within hosts first":
        return HierarchicalCudaRoute(group, layout, owners, size, spread_of(HOSTS))
    if way == "straight":
        return FlatCudaRoute(group, layout, owners, size)
    return HostRoute(group, layout, owners, size)


def exchange(group: NcclGroup, way: str, owners: Sequence[int], hold: Hold) -> tuple[str, int]:
    """Exchange two steps; returns what is wrong with what came of it, and the bytes sent to other hosts in a step."""
    layout = BucketLayout([torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in SIZES], BUCKET_BYTES)
    sent, swap = [0], group.swap

    def counted(sends: Any, receives: Any) -> None:
        far = [tensor for tensor, peer in sends if HOSTS[peer] != HOSTS[group.rank]]
        sent[0] += sum(tensor.numel() * tensor.element_size() for tensor in far)
        swap(sends, receives)

    group.swap = counted  # type: ignore[method-assign]
    try:
        route = route_of(way, group, layout, owners)
        for step in range(2):
            problem = exchange_step(step, group, route, held(layout, owners, group.rank, hold))
            if problem:
                return f"{way}, {hold}, step {step}: {problem}", 0
    finally:
        group.swap = swap  # type: ignore[method-assign]
    return "", sent[0] // 2


def exchange_step(step: int, group: NcclGroup, route: Streamed, gradients: GradientAccumulator) -> str:
    layout, owners = gradients.layout, route.owners
    before = {node: [flat.clone() for flat in flats.tensors] for node, flats in gradients.nodes.items()}
    overlaid = list(gradients.nodes.values())[-1:] if gradients.in_place else []
    result = overlaid[0] if overlaid else Flats(layout)
    attempt = Attempt(step, group, route, gradients, result, no_buffers)
    for bucket in range(len(layout.buckets) - 1 if group.rank % 2 else 0):
        route.flushed(bucket)
        attempt.overlap(bucket)
    records = tuple(
        MicrobatchRecord(microbatch=each, weight=1.0, present=b"\3") for each in share_of(owners, group.rank)
    )
    if not attempt.finish(lambda: Word(step=step, records=records, ready=1)):
        return str(attempt.error)
    for bucket, flat in enumerate(result.tensors):
        if not torch.equal(flat.cpu(), mean(owners, bucket, flat.numel())):
            return f"bucket {bucket} has other bits than the tree's"
    if gradients.in_place and gradients.aside is None:
        return ""
    gradients.fetch()
    same = [
        torch.equal(*pair)
        for node, flats in gradients.nodes.items()
        for pair in zip(flats.tensors, before[node], strict=True)
    ]
    return "" if all(same) else "what was sent is not held as it was"


@pytest.mark.parametrize("owners", [plan(8, 4), (0, 2, 1, 3, 3, -1, 0)], ids=["aligned", "as after a loss"])
def test_every_way_has_the_bits_of_the_tree_however_gradients_are_held_P1(cast: Cast, owners: tuple[int, ...]) -> None:
    """Within hosts first, what is counted between hosts is what the choice is made by."""
    actors, spread, gradient_bytes = cast.actors(4), spread_of(HOSTS), 4 * sum(SIZES)
    opened(1, list(actors))
    between = {"within hosts first": between_by_host(spread, owners), "straight": between_flat(spread, owners)}
    between["through the host"] = between["straight"] * 0
    for way, expected in between.items():
        for hold in get_args(Hold):
            for actor in actors:
                actor.ask("begin", f"{way} {hold}", "call", 1, exchange, way, owners, hold)
            outcomes = [actor.ask("end", f"{way} {hold}", LIMIT_S) for actor in actors]
            assert [each.error for each in outcomes] == [""] * 4
            assert [each.value[0] for each in outcomes] == [""] * 4
            counted = sum(each.value[1] for each in outcomes)
            assert counted == pytest.approx(float(expected * gradient_bytes), rel=0.02)
