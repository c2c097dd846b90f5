"""A body that depends on what is not put back is found before a loss makes it matter (P1)."""

from __future__ import annotations

import pytest
import torch

from craft.protocol.errors import BitsDiffer
from craft.snapshots.state.leaves import Leaf
from craft.worker.loop.inner_loop.repeated_step import REHEARSED, RepeatedStep


def test_one_attempt_at_one_step_is_taken_back_unless_a_worker_follows() -> None:
    rehearsal = RepeatedStep(list, enabled=True)
    assert rehearsal.is_due(REHEARSED, 0, ())
    assert not rehearsal.is_due(REHEARSED, 1, ())
    assert not rehearsal.is_due(REHEARSED - 1, 0, ())
    assert not rehearsal.is_due(REHEARSED, 0, ("w2",))
    assert not RepeatedStep(list, enabled=False).is_due(REHEARSED, 0, ())


def test_the_same_state_again_is_fine() -> None:
    weight = torch.ones(3)
    rehearsal = RepeatedStep(lambda: [Leaf("weight", weight)], enabled=True)
    rehearsal.check(REHEARSED)
    rehearsal.keep()
    weight.mul_(1.0)
    rehearsal.check(REHEARSED)


def test_another_state_is_named() -> None:
    weight, bias = torch.ones(3), torch.zeros(1)
    rehearsal = RepeatedStep(lambda: [Leaf("weight", weight), Leaf("bias", bias)], enabled=True)
    rehearsal.keep()
    bias.add_(1e-3)
    with pytest.raises(BitsDiffer, match="left another bias the second time"):
        rehearsal.check(REHEARSED)


def test_it_is_compared_once() -> None:
    weight = torch.ones(3)
    rehearsal = RepeatedStep(lambda: [Leaf("weight", weight)], enabled=True)
    rehearsal.keep()
    rehearsal.check(REHEARSED)
    weight.add_(1)
    rehearsal.check(REHEARSED)
