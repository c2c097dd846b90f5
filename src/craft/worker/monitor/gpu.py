"""Watch the GPU of this worker while its loop runs, on a separate thread that waits for the driver.

A driver that cannot be queried is reported once, as ``not available``.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

import torch

from craft.decide.detect.gpu_health import NOT_AVAILABLE, GpuHistory, HealthSettings, notice
from craft.decide.techniques.technique import Hooks, Surroundings
from craft.protocol.values.gpu import Reading
from craft.telemetry.nvml import Gpu

logger = logging.getLogger(__name__)


class GpuReader(Protocol):
    """A GPU that can be queried."""

    @property
    def hears(self) -> bool: ...

    def xids(self, wait_s: float) -> tuple[int, ...]: ...

    def read(self, xids: tuple[int, ...] = ()) -> Reading: ...

    def close(self) -> None: ...


class GpuWatch(Hooks):
    """Created by the main thread when the loop begins; ``close`` ends it."""

    def __init__(self, source: GpuReader, settings: HealthSettings, surroundings: Surroundings) -> None:
        self._source = source
        self._settings = settings
        self._surroundings = surroundings
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="craft-gpu-health", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        health = GpuHistory()
        try:
            while not self._closed.is_set() and not health.gone:
                reading = self._source.read(self._wait())
                health, seen = notice(health, reading, time.monotonic(), self._settings)
                for each in seen:
                    self._surroundings.tell(each.what, each.value, each.detail)
        except Exception:
            # The edge of a thread: training continues without the watch.
            logger.exception("GPU watch failed: this worker's GPU is no longer watched")
        finally:
            self._source.close()

    def _wait(self) -> tuple[int, ...]:
        """Wait for the next reading; an XID ends the wait early."""
        if self._source.hears:
            return self._source.xids(self._settings.every_s)
        self._closed.wait(self._settings.every_s)
        return ()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(self._settings.every_s + 1.0)


def watch_gpu(settings: HealthSettings, surroundings: Surroundings) -> GpuWatch | None:
    """Watch the GPU that this process uses; None without a GPU, or if the driver cannot be queried."""
    if not torch.cuda.is_initialized():
        return None
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        gpu = Gpu(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except OSError as error:
        surroundings.tell(NOT_AVAILABLE, detail=str(error))
        return None
    return GpuWatch(gpu, settings, surroundings)
