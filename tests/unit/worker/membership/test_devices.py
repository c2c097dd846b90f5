"""Which device a job trains on, and whose fault an error is; without a GPU."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.unit.worker.alone import alone

from craft.groups import nccl_calls
from craft.protocol.errors import ConfigError
from craft.worker.membership import devices
from craft.worker.membership.devices import between_devices, device_of, is_hardware_fault, make_scales, own_device
from craft.worker.membership.generation_entry import decode_entry


def on(device: str) -> tuple[str, torch.Tensor]:
    return f"weight on {device}", torch.empty(1, device=device)


def test_a_model_on_two_devices_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"job\.device"):
        device_of([on("cpu"), ("other", FakeOn("cuda:0"))])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="meta"):
        device_of([on("meta")])
    assert device_of([on("cpu"), on("cpu")]) == torch.device("cpu")
    assert device_of([]) is None


class FakeOn:
    """Of a tensor, only where it is."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_the_group_follows_the_device_unless_it_is_chosen() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert between_devices("auto", gpu) == between_devices("nccl", gpu) == gpu
    assert between_devices("gloo", gpu) is between_devices("auto", cpu) is between_devices("gloo", cpu) is None
    with pytest.raises(ConfigError, match="--group auto"):
        between_devices("nccl", cpu)


def test_a_member_that_came_with_something_else_is_told_of_different_devices() -> None:
    with pytest.raises(ConfigError, match=r"job\.device"):
        decode_entry(b"nccl\0" + bytes(range(128)))
    with pytest.raises(ConfigError, match=r"job\.device"):
        decode_entry(msgspec.msgpack.encode("nccl"))


def test_a_device_that_failed_is_told_from_a_script_that_did() -> None:
    failed = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with ...")
    assert is_hardware_fault(failed)
    because = ValueError("in the middle of something")
    because.__cause__ = failed
    assert is_hardware_fault(because)
    assert not is_hardware_fault(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_hardware_fault(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NCCL here")
def test_without_nccl_it_says_so() -> None:
    with pytest.raises(nccl_calls.NcclError, match="NCCL is not installed"):
        nccl_calls.version()


def test_a_scaler_can_update_before_it_has_scaled_a_loss() -> None:
    """As in a worker that joins, which replays a step of the others first."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler, off = torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", enabled=False)
    make_scales([optimizer, scaler, off], torch.device("cpu"))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    weight.grad = torch.tensor([2.0, 4.0])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, -1.0] and scaler.get_scale() == 2.0


def test_workers_of_a_host_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [own_device(place) for place in range(3)] == [torch.device("cuda", number) for number in (0, 1, 0)]


@pytest.mark.parametrize(("group", "begun"), [("auto", [torch.device("cuda", 0)]), ("gloo", [])])
def test_nccl_is_made_ready_when_a_script_asks_for_its_gpu_unless_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, group: str, begun: list[torch.device]
) -> None:
    found: list[torch.device] = []
    monkeypatch.setattr("craft.worker.api.loop_builder.own_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr("craft.worker.api.loop_builder.warm_up", found.append)
    assert alone(group=group).device == torch.device("cuda", 0)
    assert found == begun


def test_what_goes_wrong_while_nccl_is_made_ready_is_left_to_the_first_group_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "init", fail)
    devices._use_once(torch.device("cuda", 0))
