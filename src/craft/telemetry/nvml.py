"""Read a GPU's health from the driver through NVML (the package ``nvidia-ml-py``, imported on first use).

In: the UUID of a device. Out: a ``Reading`` per call. If the package, driver or device is missing, ``why_not`` returns the
reason; that is never an error of the job.
"""

from __future__ import annotations

import importlib
from typing import Any

from craft.protocol.values.gpu import Reading

_HOT = {0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown"}
"""NVML's throttle-reason bits that mean heat."""
_UNCORRECTED, _VOLATILE = 1, 0
_XID = 8
_LOST, _TIMEOUT = 15, 10
"""NVML's error codes: the device fell off the bus; no event arrived in time."""


def why_not(nvml: Any = None) -> str | None:
    """Return why GPU health cannot be monitored here; None if it can."""
    try:
        nvml = nvml if nvml is not None else importlib.import_module("pynvml")
    except ImportError:
        return "the package nvidia-ml-py is not installed: pip install craft[gpu]"
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return f"the NVIDIA driver does not answer ({error})"
    return None if count else "this host has no NVIDIA GPU"


class Gpu:
    """One device, owned by the thread that reads it. A read takes well below 10 ms."""

    def __init__(self, uuid: str) -> None:
        """Raise ``OSError`` with the reason if the device cannot be monitored."""
        reason = why_not()
        if reason is not None:
            raise OSError(reason)
        self._nvml: Any = importlib.import_module("pynvml")
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.name = f"{_text(self._nvml.nvmlDeviceGetName(self._handle))} {uuid}"
            self._events = self._register()
        except self._nvml.NVMLError as error:
            raise OSError(f"GPU {uuid} cannot be monitored ({error})") from None

    def _register(self) -> Any:
        """Return a set of events to wait for XIDs with; None where the device or permissions do not allow it."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._handle, _XID, events)
        except self._nvml.NVMLError:
            return None
        return events

    @property
    def hears(self) -> bool:
        """Whether the driver reports XIDs to this process."""
        return self._events is not None

    def xids(self, wait_s: float) -> tuple[int, ...]:
        """Wait for XIDs, at most ``wait_s``; return those that arrived."""
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, round(wait_s * 1000))
        except self._nvml.NVMLError as error:
            if error.value not in (_TIMEOUT, _LOST):
                self._events = None
            return ()
        return (int(event.eventData),) if event.eventType == _XID else ()

    def read(self, xids: tuple[int, ...] = ()) -> Reading:
        """Return the current reading. Values that the device does not support (such as ECC) are None."""
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
        """Return None for values that the device or driver does not support; raise if the device is gone."""
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
