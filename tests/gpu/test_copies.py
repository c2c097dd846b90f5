"""State is copied off the device beside what it computes, into pinned memory, and comes back to the device."""

from __future__ import annotations

import torch

from craft.snapshots.state.device_copy import hold_back
from craft.snapshots.state.raw_memory import carve
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.state.serialized import State, load

NUMEL = 40 << 20


class Net(torch.nn.Module):
    """Larger than anything that is copied at once, with a buffer that is no multiple of anything."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(NUMEL, device="cuda"))
        self.register_buffer("seen", torch.randn(12345, device="cuda"))


def stepped() -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.weight.grad = torch.randn_like(net.weight)
    optimizer.step()
    return net, optimizer


def test_what_is_copied_is_what_was_there_though_the_update_comes_at_once_P3() -> None:
    net, optimizer = stepped()
    state = State({"model": net}, {"optimizer": optimizer}, b"")
    expected = [tensor.detach().cpu().clone() for tensor in state.tensors]
    size = state.header.total_bytes
    out = carve(Reserve(size).take(size), 0, size)
    assert out.is_pinned(), "the device writes there by itself"

    state.copy(0, size, out)
    copied = state.copied()
    hold_back()
    # As the script's update does, with nothing in between.
    for tensor in state.tensors:
        tensor.zero_()
    copied()

    begin = 0
    for tensor in expected:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(out[begin : begin + data.numel()], data)
        begin += data.numel()
    assert begin == size


def test_a_state_that_comes_back_is_on_the_device_again_P1() -> None:
    net, optimizer = stepped()
    state = State({"model": net}, {"optimizer": optimizer}, b"")
    on_host = [tensor.detach().cpu().clone() for tensor in state.tensors]
    other = Net()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)

    load(state.header, on_host, {"model": other}, {"optimizer": fresh})

    assert torch.equal(other.weight, net.weight) and torch.equal(other.seen, net.seen)
    mine, theirs = fresh.state[other.weight], optimizer.state[net.weight]
    assert mine["exp_avg"].is_cuda and torch.equal(mine["exp_avg"], theirs["exp_avg"])
    assert mine["step"].device == theirs["step"].device
