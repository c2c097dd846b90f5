"""What holding gradients costs: as much as ``worker/reduce/accumulator.py`` really takes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from craft.decide.step.gradient_memory import held
from craft.decide.step.plan import plan, share_of
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.flats import Flats


class Counted(GradientAccumulator):
    """Counts the buffers that it ever had to make, which is how many there were at once."""

    made = 0

    def take(self) -> Flats:
        self.made += not self._pool
        return super().take()


def really_made(share: tuple[int, ...], num_microbatches: int, lending: bool = False) -> int:
    layout = BucketLayout([torch.nn.Parameter(torch.zeros(3))], 100)
    gradients, result = Counted(layout), Flats(layout)
    for microbatch in share:
        gradients.start(microbatch, num_microbatches, None, result if lending and microbatch == share[-1] else None)
        gradients.finish()
    return gradients.made + lending


@settings(deadline=None)
@given(num_microbatches=st.integers(1, 40), num_workers=st.integers(1, 8))
def test_as_many_copies_are_counted_as_are_made(num_microbatches: int, num_workers: int) -> None:
    owners = plan(num_microbatches, num_workers)
    shares = [share_of(owners, rank) for rank in range(num_workers)]
    cost = held(num_microbatches, num_workers)
    assert cost.nodes == max(really_made(share, num_microbatches) for share in shares)
    assert cost.overlaid == max(really_made(share, num_microbatches, lending=True) for share in shares)
    assert cost.overlaid <= cost.apart


def test_one_microbatch_for_each_worker_costs_the_gradient_its_result_and_what_others_send() -> None:
    cost = held(4, 4)
    assert (cost.nodes, cost.inbox, cost.result) == (1, 0.75, 1)
    assert (cost.apart, cost.overlaid, cost.blocks) == (2, 1, 1)
    assert held(2, 2).inbox == 1.0
    assert held(1, 1).inbox == 0.0
