"""What travels beside the state: modes of modules, and what they give by ``get_extra_state``."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from craft.snapshots.state.leaves import registered_leaves
from craft.snapshots.state.serialized import State, load
from craft.worker.api.job import Job
from craft.worker.state.metadata import ModuleModes

from ..alone import alone
from ..alone import model as plain_model


def model() -> torch.nn.Sequential:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    return torch.nn.Sequential(inner, torch.nn.Linear(2, 2, bias=False))


def test_frozen_parameters_and_eval_modes_arrive_and_others_are_switched_back() -> None:
    first, second = model(), model()
    first.get_submodule("0.0").requires_grad_(False)
    first.get_submodule("0.1").eval()
    second[1].requires_grad_(False)
    second.eval()
    modes = msgspec.json.decode(msgspec.json.encode(ModuleModes.of({"model": first}, {})), type=ModuleModes)

    modes.put({"model": second}, {})

    assert ModuleModes.of({"model": second}, {}) == modes
    assert [param.requires_grad for param in second.parameters()] == [False, False, True]
    assert [module.training for module in second.modules()] == [True, True, True, False, True]


def test_a_new_model_has_default_modes() -> None:
    assert ModuleModes.of({"model": model()}, {}) == ModuleModes()


def test_param_groups_added_later_are_added_and_removed_with_the_state() -> None:
    first, second = model(), model()
    one = torch.optim.SGD(first.get_submodule("1").parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(second.get_submodule("1").parameters(), lr=0.1, momentum=0.9)
    before = ModuleModes.of({"model": first}, {"sgd": one})
    one.add_param_group({"params": list(first.get_submodule("0.0").parameters()), "lr": 0.01})

    ModuleModes.of({"model": first}, {"sgd": one}).put({"model": second}, {"sgd": other})
    other.load_state_dict(one.state_dict())

    assert [group["lr"] for group in other.param_groups] == [0.1, 0.01]
    assert other.param_groups[1]["params"][0] is next(second.get_submodule("0.0").parameters())
    before.put({"model": second}, {"sgd": other})
    assert len(other.param_groups) == 1


class Counting(torch.nn.Linear):
    """Counts in a plain attribute, and gives it as extra state."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: dict[str, Any] = {"count": 0, "mean": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


def job_of(*nets: torch.nn.Module) -> Job:
    job = alone()
    for net in nets:
        job.replicate(net)
    return job


def test_a_joiner_has_the_extra_state_of_every_part_of_every_module() -> None:
    mine, theirs = ((Counting(), Counting(), Counting()) for _ in range(2))
    mine[1].seen = {"count": 7, "mean": torch.ones(2)}
    mine[2].seen = {"count": 9, "mean": torch.arange(2.0)}
    giver, joiner = (job_of(torch.nn.Sequential(*parts[:2]), parts[2]) for parts in (mine, theirs))

    state = State(giver._loops.modules, giver._loops.registered, b"")
    load(state.header, state.tensors, joiner._loops.modules, joiner._loops.registered)

    assert [part.seen["count"] for part in theirs] == [0, 7, 9]
    assert torch.equal(theirs[2].seen["mean"], torch.arange(2.0))


def test_extra_state_is_not_compared_between_workers() -> None:
    """Forward may count something: a difference must not end the job."""
    assert registered_leaves(job_of(Counting())._loops.registered) == []


def test_a_module_without_extra_state_registers_nothing() -> None:
    assert job_of(plain_model())._loops.registered == {}
