"""What the driver of a real GPU says of its health, and what ``craft doctor`` measures there."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time

import pytest
import torch

from craft.decide.detect.gpu_health import GpuHistory, HealthSettings, notice
from craft.telemetry.nvml import Gpu, why_not
from craft.worker.monitor.gpu import watch_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and a torch built for it")


def this_gpu() -> Gpu:
    torch.zeros(1, device="cuda")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return Gpu(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def test_the_driver_can_be_asked() -> None:
    assert why_not() is None


def test_a_healthy_gpu_is_read_in_milliseconds_and_has_nothing_to_tell() -> None:
    gpu = this_gpu()
    began = time.monotonic()
    readings = [gpu.read() for _ in range(20)]
    each_ms = (time.monotonic() - began) / 20 * 1e3
    heard = gpu.hears
    assert gpu.xids(0.2) == ()
    gpu.close()
    first = readings[0]
    print(f"{first}, hears XIDs: {heard}, {each_ms:.2f} ms per reading")
    assert first.lost is None and first.temperature_c is not None and 0 < first.temperature_c < 110
    assert each_ms < 100
    health, told = GpuHistory(), []
    for second, reading in enumerate(readings):
        health, seen = notice(health, reading, float(second), HealthSettings())
        told += [each for each in seen if each.what != "heat"]
    assert told == []


class Told:
    worker_id = "w0"
    host = "a"

    def __init__(self) -> None:
        self.conditions: queue.SimpleQueue[str] = queue.SimpleQueue()

    def tell(self, what: str, value: float | None = None, detail: str = "") -> None:
        self.conditions.put(f"{what}: {detail}")


def test_a_worker_watches_the_gpu_that_it_uses_until_its_loop_ends() -> None:
    torch.zeros(1, device="cuda")
    told = Told()
    watch = watch_gpu(HealthSettings(every_s=0.1), told)
    assert watch is not None, told.conditions.get_nowait()
    watch.close()
    assert told.conditions.empty()


def test_a_gpu_that_is_not_there_is_not_available_and_no_error() -> None:
    with pytest.raises(OSError, match="cannot be monitored"):
        Gpu("GPU-00000000-0000-0000-0000-000000000000")


def test_doctor_measures_memory_nccl_and_bandwidths() -> None:
    command = [sys.executable, "-m", "craft.cli.main", "doctor", "--json", "--params", "1e9", "--dtype", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    findings = {each["subject"]: each for each in json.loads(done.stdout)}
    print(findings["GPU 0"]["found"], "| NCCL", findings["NCCL"]["found"], "|", findings["Gloo"]["found"])
    assert findings["GPU 0"]["grade"] == "ok"
    assert findings["NCCL"]["found"][0].isdigit()
    assert "GPU health" not in findings
