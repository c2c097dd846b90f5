"""What holding gradients costs: as much as ``worker/gradients.py`` really takes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from craft.decide.held import held
from craft.decide.plan import plan, share_of
from craft.worker.gradients import Flats, Gradients
from craft.worker.layout import Layout


class Counted(Gradients):
    """Counts the buffers that it ever had to make, which is how many there were at once."""

    made = 0

    def take(self) -> Flats:
        self.made += not self._pool
        return super().take()


def really_made(share: tuple[int, ...], num_microbatches: int) -> int:
    gradients = Counted(Layout([torch.nn.Parameter(torch.zeros(3))], 100))
    for microbatch in share:
        gradients.hold_empty(microbatch, num_microbatches)
    return gradients.made


@settings(deadline=None)
@given(num_microbatches=st.integers(1, 40), num_workers=st.integers(1, 8))
def test_as_many_copies_are_counted_as_are_made(num_microbatches: int, num_workers: int) -> None:
    owners = plan(num_microbatches, num_workers)
    made = [really_made(share_of(owners, rank), num_microbatches) for rank in range(num_workers)]
    assert held(num_microbatches, num_workers).nodes == max(made)


def test_one_microbatch_for_each_worker_costs_the_gradient_its_result_and_what_others_send() -> None:
    cost = held(4, 4)
    assert (cost.nodes, cost.inbox, cost.result) == (1, 0.75, 1)
    assert cost.on_device == 2.75
    assert cost.recompute == 1.75
    assert held(2, 2).inbox == 1.0
    assert held(1, 1).inbox == 0.0
