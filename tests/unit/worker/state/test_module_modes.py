"""What parameters and modules are switched to, as it travels beside the state."""

from __future__ import annotations

import msgspec
import torch

from craft.worker.state.module_modes import ModuleModes


def model() -> torch.nn.Sequential:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    return torch.nn.Sequential(inner, torch.nn.Linear(2, 2, bias=False))


def test_what_is_frozen_and_what_is_in_eval_arrives_and_what_is_not_is_switched_back() -> None:
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


def test_of_a_new_model_nothing_is_told() -> None:
    assert ModuleModes.of({"model": model()}, {}) == ModuleModes()


def test_groups_that_were_added_on_the_way_are_added_here_too_and_those_of_a_later_time_are_not_there() -> None:
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
