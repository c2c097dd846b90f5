"""Every microbatch starts from the buffers of the step's beginning, and every step ends with those of microbatch 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from craft.protocol.errors import ConfigError
from craft.worker.reduce.module_buffers import ModuleBuffers


class Holder(torch.nn.Module):
    """A module with one buffer, which ``change`` changes."""

    value: torch.Tensor

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def step(owner: ModuleBuffers, others: list[ModuleBuffers]) -> None:
    """What a step does with the buffers once all microbatches are computed and ``owner`` has computed microbatch 0."""
    changed = owner.changed
    packed = owner.pack()
    for each in others:
        room = each.empty_like(changed)
        room.copy_(packed)
        each.commit(changed, room)
    owner.commit(changed, packed)


LARGE = 1 << 19
"""More bytes in float32 than are compared bit by bit."""


def in_place(module: Holder) -> None:
    module.value.add_(1)


def replaced(module: Holder) -> None:
    module.value = module.value + 1


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("change", [in_place, replaced])
def test_a_change_in_a_microbatch_is_gone_before_the_next(change: Callable[[Holder], None], size: int) -> None:
    module = Holder(torch.zeros(size))
    buffers = ModuleBuffers([module])

    for _ in range(2):
        buffers.restore()
        assert module.value.eq(0).all()
        change(module)
        assert module.value.eq(1).all()


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("change", [in_place, replaced])
def test_after_a_step_every_worker_has_what_microbatch_0_made(change: Callable[[Holder], None], size: int) -> None:
    modules = [Holder(torch.zeros(size)) for _ in range(3)]
    workers = [ModuleBuffers([module]) for module in modules]

    for number in range(1, 3):
        # The third one is idle: it computes nothing at all.
        for worker, module in zip(workers[:2], modules[:2], strict=True):
            worker.restore()
            change(module)
        workers[1].keep_first()
        # A later microbatch on the same worker leaves no trace.
        workers[1].restore()
        change(modules[1])
        change(modules[1])
        step(workers[1], [workers[0], workers[2]])

        assert all(module.value.eq(number).all() for module in modules)


def test_a_buffer_that_is_replaced_is_the_registered_tensor_again_afterwards() -> None:
    """Whoever holds the tensor itself sees what the module has, and no graph of a past microbatch hangs on it."""
    weight = torch.ones(3, requires_grad=True)
    module = Holder(torch.zeros(3))
    registered = module.value
    buffers = ModuleBuffers([module])

    for number in (1, 2):
        buffers.restore()
        module.value = module.value + weight
        torch.autograd.backward(module.value.sum())
        buffers.keep_first()
        step(buffers, [])
        assert module.value is registered
        assert not module.value.requires_grad
        assert module.value.eq(number).all()


def test_batch_norm_travels_whole_and_bit_for_bit() -> None:
    torch.manual_seed(0)
    modules = [torch.nn.BatchNorm1d(5) for _ in range(2)]
    workers = [ModuleBuffers([module]) for module in modules]

    modules[0](torch.randn(7, 5))
    modules[1](torch.randn(7, 5))
    expected = {name: buffer.clone() for name, buffer in modules[0].named_buffers()}
    workers[0].keep_first()
    step(workers[0], [workers[1]])

    for module in modules:
        assert {name: bits(buffer) for name, buffer in module.named_buffers()} == {
            name: bits(buffer) for name, buffer in expected.items()
        }


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.zeros(2, dtype=torch.complex64),
        torch.tensor([True, False]),
    ],
    ids=["transposed", "channels_last", "bfloat16", "scalar", "complex", "bool"],
)
def test_a_buffer_of_any_kind_travels(value: torch.Tensor) -> None:
    modules = [Holder(value.clone()) for _ in range(2)]
    workers = [ModuleBuffers([module]) for module in modules]

    modules[0].value.copy_(~value if value.dtype is torch.bool else value * 2 + 1)
    expected = bits(modules[0].value)
    assert expected != bits(value)
    workers[0].keep_first()
    step(workers[0], [workers[1]])

    assert [bits(module.value) for module in modules] == [expected, expected]
    assert modules[1].value.stride() == value.stride()


def test_negative_zero_is_a_change_and_a_nan_that_stays_is_none() -> None:
    zero = Holder(torch.zeros(1))
    buffers = ModuleBuffers([zero, Holder(torch.full((1,), float("nan")))])

    zero.value.copy_(torch.tensor(-0.0))
    buffers.keep_first()

    assert buffers.changed == (0,)


def test_a_buffer_that_two_modules_share_counts_once() -> None:
    shared = torch.zeros(2)

    assert len(ModuleBuffers([Holder(shared), Holder(shared)])) == 1


def test_without_a_change_there_is_nothing_to_send() -> None:
    module = Holder(torch.zeros(2))
    buffers = ModuleBuffers([module])

    buffers.keep_first()

    assert buffers.changed == ()
    step(buffers, [])
    assert module.value.eq(0).all()


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("change", [in_place, replaced])
def test_what_code_between_the_steps_made_of_a_buffer_stays(change: Callable[[Holder], None], size: int) -> None:
    module = Holder(torch.zeros(size))
    buffers = ModuleBuffers([module])
    buffers.begin()
    buffers.restore()
    step(buffers, [])

    change(module)
    buffers.begin()

    for _ in range(2):
        buffers.restore()
        assert module.value.eq(1).all()
        module.value.fill_(7)
    step(buffers, [])
    assert module.value.eq(1).all()


def test_between_the_steps_a_buffer_may_grow() -> None:
    module = Holder(torch.zeros(2))
    buffers = ModuleBuffers([module])

    module.value = torch.ones(7)
    buffers.begin()
    buffers.restore()
    module.value.add_(1)
    buffers.keep_first()
    step(buffers, [])

    assert bits(module.value) == bits(torch.full((7,), 2.0))


def test_a_buffer_that_was_taken_away_between_the_steps_is_an_error_that_names_it() -> None:
    module = Holder(torch.zeros(2))
    buffers = ModuleBuffers([module])

    del module.value

    with pytest.raises(ConfigError, match="the buffer value is gone"):
        buffers.begin()


def grow(module: Holder) -> None:
    module.value = torch.zeros(7)


def convert(module: Holder) -> None:
    module.value = module.value.double()


def remove(module: Holder) -> None:
    module._buffers["value"] = None


@pytest.mark.parametrize(
    ("change", "became"),
    [(grow, "torch.float32 of shape (7,)"), (convert, "torch.float64 of shape (2,)"), (remove, "nothing")],
)
def test_a_buffer_that_becomes_another_kind_is_refused_by_name(change: Callable[[Holder], None], became: str) -> None:
    module = Holder(torch.zeros(2))
    buffers = ModuleBuffers([torch.nn.Sequential(torch.nn.Identity(), module)])

    change(module)

    with pytest.raises(ConfigError) as caught:
        buffers.keep_first()
    assert str(caught.value).startswith(
        f"the buffer 1.value was torch.float32 of shape (2,) and became {became} in the"
    )


@pytest.mark.parametrize("change", [grow, convert, remove])
def test_in_any_other_microbatch_such_a_change_is_undone(change: Callable[[Holder], None]) -> None:
    module = Holder(torch.ones(2))
    buffers = ModuleBuffers([module])

    change(module)
    buffers.restore()

    assert bits(module.value) == bits(torch.ones(2))


class Late(torch.nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=persistent)


def test_a_buffer_that_is_filled_in_the_forward_pass_is_refused_by_name() -> None:
    module = Late(persistent=True)
    buffers = ModuleBuffers([module])
    buffers.begin()
    buffers.restore()
    module.table = torch.zeros(3)
    with pytest.raises(ConfigError, match="the buffer table was nothing and became "):
        buffers.restore()


def test_one_that_is_not_saved_may_be_filled_at_any_time_like_a_plain_attribute() -> None:
    module = Late(persistent=False)
    buffers = ModuleBuffers([module])
    buffers.begin()
    module.table = torch.zeros(3)
    buffers.restore()
    assert module.table is not None


def test_one_that_is_filled_between_the_steps_is_a_buffer_like_any_other_from_then_on() -> None:
    module = Late(persistent=True)
    buffers = ModuleBuffers([module])
    module.table = torch.zeros(3)
    buffers.begin()
    module.table.add_(1.0)
    buffers.restore()
    assert module.table.tolist() == [0.0, 0.0, 0.0]


class Scaled(torch.nn.Module):
    """Its gradient depends on a buffer, which each forward changes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self) -> torch.Tensor:
        self.scale.add_(1)
        return (self.weight * self.scale).sum()


def test_a_graph_that_outlives_its_microbatch_can_be_run_backward_afterwards() -> None:
    """Batch norm's running statistics are saved for backward, though it does not read them in train()."""
    torch.manual_seed(0)
    module, x = torch.nn.BatchNorm1d(3), torch.randn(4, 3, requires_grad=True)
    registered = module.running_mean
    buffers = ModuleBuffers([module], graphs_live_on=True)
    losses = []
    for number in range(2):
        buffers.restore()
        assert module.state_dict()["running_mean"].eq(0).all()
        losses.append(module(x).pow(3).sum())
        if number == 0:
            buffers.keep_first()
            first = module.state_dict()["running_mean"].clone()
    step(buffers, [])
    assert torch.equal(first, module.state_dict()["running_mean"])
    for loss in losses:
        loss.backward()
    buffers.put_registered_back(graphs_are_done=False)
    assert registered is not None and module.running_mean is registered and torch.equal(first, registered)


def test_a_graph_that_reads_a_buffer_finds_what_was_there_in_its_microbatch() -> None:
    module = Scaled()
    registered = module.scale
    buffers = ModuleBuffers([module], graphs_live_on=True)
    losses = []
    for _ in range(3):
        buffers.restore()
        assert module.scale.eq(1).all()
        losses.append(module())
    for loss in losses:
        loss.backward()
    assert module.weight.grad is not None and module.weight.grad.eq(6).all()
    buffers.put_registered_back(graphs_are_done=True)
    assert module.scale is registered


def test_a_buffer_that_is_known_by_two_names_stays_one_tensor() -> None:
    """Then torch's own check for modifications stands, and nothing is silently wrong."""
    module = Scaled()
    module.alias = module.scale[:2]
    buffers = ModuleBuffers([module], graphs_live_on=True)
    loss = module()
    buffers.restore()
    assert module.alias.eq(1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_buffers_that_code_between_the_steps_changed_are_told_with_their_hashes() -> None:
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(40_000))
    buffers = ModuleBuffers([net], ["model"])
    net[0](torch.randn(4, 2))
    buffers.begin()
    # Until a step was committed, workers need not have had the same before.
    assert buffers.touched is None

    buffers.commit((), None)
    buffers.begin()
    assert buffers.touched == ()

    net[0](torch.ones(4, 2))
    net[1](torch.ones(4, 40_000))
    buffers.begin()
    assert buffers.touched is not None
    # The large ones have their turn in the digest of the state.
    small = ["running_mean", "running_var", "num_batches_tracked"]
    names = [f"model.0.{name}" for name in small] + ["model.1.num_batches_tracked"]
    assert [buffers.name_of(index) for index, _ in buffers.touched] == names
    hashes = dict(buffers.touched)

    buffers.begin()
    assert buffers.touched == ()
    with torch.no_grad():
        for buffer in net[0].buffers():
            buffer.add_(1)
    buffers.begin()
    assert buffers.touched and all(hashes[index] != found for index, found in buffers.touched)
