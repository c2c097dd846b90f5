"""A step that is taken back leaves nothing behind: not in the state, and not in what is switched beside it."""

from __future__ import annotations

import torch

from craft.snapshots.state.serialized import State
from craft.worker.recovery.undo import StateCopy


def test_what_a_body_switched_is_put_back_with_the_state() -> None:
    first = torch.nn.Linear(2, 2)
    net = torch.nn.Sequential(first, torch.nn.Dropout(), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
    modules, registered = {"net": net}, {"optimizer": optimizer}
    kept = StateCopy(lambda: State(modules, registered, b""), modules, registered)
    kept.take()
    before = first.weight.detach().clone()

    with torch.no_grad():
        first.weight.add_(1)
    first.requires_grad_(False)
    net[1].eval()
    optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.5})
    kept.put_back()

    assert torch.equal(first.weight, before)
    assert first.weight.requires_grad
    assert net[1].training
    assert len(optimizer.param_groups) == 1
