"""A worker's watch over its GPU, with readings from memory: what is new is told once, and the thread ends with the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from craft.decide.detect.gpu_health import HealthSettings
from craft.protocol.values.gpu import Reading
from craft.telemetry.nvml import why_not
from craft.worker.monitor.gpu import GpuWatch, watch_gpu

DEVICE = "H200 GPU-1"


class Told:
    """Surroundings that keep what they are told."""

    worker_id = "w0"
    host = "a"

    def __init__(self) -> None:
        self.conditions: queue.SimpleQueue[tuple[str, float | None, str]] = queue.SimpleQueue()

    def tell(self, what: str, value: float | None = None, detail: str = "") -> None:
        self.conditions.put((what, value, detail))


class Readings:
    """A GPU that says these things one after the other, and then the last one for ever."""

    hears = True

    def __init__(self, readings: Sequence[Reading | Exception]) -> None:
        self._readings = list(readings)
        self.closed = threading.Event()

    def xids(self, wait_s: float) -> tuple[int, ...]:
        self.closed.wait(min(wait_s, 0.001))
        return ()

    def read(self, xids: tuple[int, ...] = ()) -> Reading:
        reading = self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]
        if isinstance(reading, Exception):
            raise reading
        return reading

    def close(self) -> None:
        self.closed.set()


def test_what_is_new_is_told_and_the_watch_ends_with_the_loop() -> None:
    told, source = Told(), Readings([Reading(device=DEVICE, uncorrected=count) for count in (0, 0, 3, 3)])
    watch = GpuWatch(source, HealthSettings(every_s=0.1), told)
    assert told.conditions.get(timeout=30)[:2] == ("ecc", 3.0)
    watch.close()
    assert source.closed.is_set()
    assert told.conditions.empty()


def test_a_gpu_that_is_gone_is_told_and_not_asked_again() -> None:
    told, source = Told(), Readings([Reading(device=DEVICE, lost="GPU is lost")])
    GpuWatch(source, HealthSettings(every_s=0.1), told)
    assert told.conditions.get(timeout=30) == ("lost", None, f"{DEVICE} does not answer any more: GPU is lost")
    assert source.closed.wait(30)


def test_a_reading_that_fails_ends_the_watch_and_nothing_else() -> None:
    source = Readings([RuntimeError("a bug")])
    GpuWatch(source, HealthSettings(every_s=0.1), Told())
    assert source.closed.wait(30)


def test_without_a_gpu_nothing_is_watched_and_nothing_is_told() -> None:
    told = Told()
    assert watch_gpu(HealthSettings(), told) is None
    assert told.conditions.empty()


class NoDriver:
    """What the package is where the driver is missing."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        raise self.NVMLError("NVML Shared Library Not Found")


def test_why_it_is_not_available_is_a_sentence() -> None:
    assert why_not(NoDriver()) == "the NVIDIA driver does not answer (NVML Shared Library Not Found)"
    assert torch.cuda.is_available() or why_not() is not None
