"""What the driver knows of a GPU's health, by NVML (the package ``nvidia-ml-py``, imported only when somebody asks).

Enters: the UUID of a device. Leaves: a ``Reading`` each time one is asked for. Where package, driver or device are missing,
``why_not`` says so in a sentence; nothing here is an error of the job.
"""

from __future__ import annotations

import importlib
from typing import Any

from craft.protocol.values.gpu import Reading

_HOT = {0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown"}
"""NVML's bits for why clocks are held down; those that mean heat."""
_UNCORRECTED, _VOLATILE = 1, 0
_XID = 8
_LOST, _TIMEOUT = 15, 10
"""Of NVML's errors: the device fell off the bus; no event came within the time."""


def why_not(nvml: Any = None) -> str | None:
    """Why the health of GPUs cannot be watched here; None if it can."""
    try:
        nvml = nvml if nvml is not None else importlib.import_module("pynvml")
    except ImportError:
        return "the package nvidia-ml-py is not installed: pip install craft[gpu]"
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return f"the driver of NVIDIA's GPUs does not answer ({error})"
    return None if count else "this host has no NVIDIA GPU"


class Gpu:
    """One device. Owned by the thread that reads it; the driver is asked for all at once, which takes well below 10 ms."""

    def __init__(self, uuid: str) -> None:
        """Raises ``OSError`` with a sentence where that device cannot be watched."""
        reason = why_not()
        if reason is not None:
            raise OSError(reason)
        self._nvml: Any = importlib.import_module("pynvml")
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.name = f"{_text(self._nvml.nvmlDeviceGetName(self._handle))} {uuid}"
            self._events = self._register()
        except self._nvml.NVMLError as error:
            raise OSError(f"GPU {uuid} cannot be watched ({error})") from None

    def _register(self) -> Any:
        """A set of events to wait for XIDs with; None where the device or the rights do not allow it."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._handle, _XID, events)
        except self._nvml.NVMLError:
            return None
        return events

    @property
    def hears(self) -> bool:
        """Whether it is told of XIDs."""
        return self._events is not None

    def xids(self, wait_s: float) -> tuple[int, ...]:
        """Wait for XIDs, for so long at most; returns those that came."""
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, round(wait_s * 1000))
        except self._nvml.NVMLError as error:
            if error.value not in (_TIMEOUT, _LOST):
                self._events = None
            return ()
        return (int(event.eventData),) if event.eventType == _XID else ()

    def read(self, xids: tuple[int, ...] = ()) -> Reading:
        """What the driver says now. What a device does not know (ECC on a small one) is None."""
        try:
            return Reading(
                device=self.name,
                xids=xids,
                uncorrected=self._ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
                hot=self._hot(),
                temperature_c=self._ask("nvmlDeviceGetTemperature", 0),
            )
        except self._nvml.NVMLError as error:
            return Reading(device=self.name, xids=xids, lost=str(error))

    def _hot(self) -> tuple[str, ...]:
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return tuple(words for bit, words in _HOT.items() if bits & bit)

    def _ask(self, call: str, *arguments: int) -> int | None:
        """None for what this device or driver does not tell; a device that is gone raises."""
        try:
            return int(getattr(self._nvml, call)(self._handle, *arguments))
        except self._nvml.NVMLError as error:
            if error.value == _LOST:
                raise
            return None

    def close(self) -> None:
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
            self._events = None


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
