"""Interpret GPU readings of ``worker/monitor/gpu`` for ``policies/detected``. Pure: the clock is an argument."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from craft.protocol.values.config import says
from craft.protocol.values.gpu import Reading

HealthAnswer = Literal["report", "drain", "replace"]

LOST, ECC, XID, MINOR_XID, HEAT, COOL = "lost", "ecc", "xid", "minor xid", "heat", "heat is over"
NOT_AVAILABLE = "not available"

_MEANINGS = {
    13: "graphics engine exception: most likely a fault of the program",
    31: "memory page fault: most likely a fault of the program",
    43: "reset of a channel: most likely a fault of the program",
    45: "preemptive cleanup, after another error or the end of the program",
    48: "ECC error that could not be corrected",
    62: "microcontroller halted",
    63: "memory page or row taken out of use",
    64: "memory page or row could not be taken out of use",
    74: "NVLink error",
    79: "the GPU fell off the bus",
    92: "many ECC errors that were corrected",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "ECC error that was not recovered from",
}
_SERIOUS = (48, 62, 64, 74, 79, 94, 95, 119, 120, 140)


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lost: Annotated[
        HealthAnswer,
        says("To a GPU that does not answer any more: report; drain: the worker leaves; replace: at once."),
    ] = "replace"
    ecc: Annotated[HealthAnswer, says("To ECC errors that could not be corrected.")] = "replace"
    xid: Annotated[HealthAnswer, says("To an XID of serious_xids; any other is only reported.")] = "replace"
    heat: Annotated[HealthAnswer, says("To clocks that are held down because of heat.")] = "report"
    serious_xids: Annotated[
        tuple[int, ...], says("NVIDIA's numbers of errors that a GPU does not get over by itself.")
    ] = _SERIOUS
    every_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600.0), says("How often each worker looks at its GPU.")] = 1.0
    heat_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6), says("Heat counts once it has lasted for so long.")] = 10.0
    drain_s: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1e6),
        says("A worker that is to leave and is still there after so long is ended."),
    ] = 30.0


class GpuCondition(msgspec.Struct, frozen=True):
    """One condition, as it is reported."""

    what: str
    value: float | None
    detail: str


class GpuHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one GPU."""

    uncorrected: int | None = None
    """ECC errors at the last reading that had them; those before the job do not count."""
    hot_since: float | None = None
    told_heat: bool = False
    gone: bool = False


def notice(
    health: GpuHistory, reading: Reading, now: float, settings: HealthSettings
) -> tuple[GpuHistory, tuple[GpuCondition, ...]]:
    """Take a reading in; return its new conditions."""
    seen = [_xid(reading, number, settings) for number in reading.xids]
    if reading.lost is not None:
        if not health.gone:
            seen.append(GpuCondition(LOST, None, f"{reading.device} does not answer any more: {reading.lost}"))
        return replace(health, gone=True), tuple(seen)
    health, more = _ecc(health, reading)
    seen += more
    health, more = _heat(health, reading, now, settings.heat_s)
    return replace(health, gone=False), (*seen, *more)


def _xid(reading: Reading, number: int, settings: HealthSettings) -> GpuCondition:
    meaning = _MEANINGS.get(number, "see NVIDIA's list of XIDs")
    what = XID if number in settings.serious_xids else MINOR_XID
    return GpuCondition(what, float(number), f"{reading.device}: XID {number}, {meaning}")


def _ecc(health: GpuHistory, reading: Reading) -> tuple[GpuHistory, list[GpuCondition]]:
    before, now = health.uncorrected, reading.uncorrected
    if now is None:
        return health, []
    more = now - before if before is not None else 0
    seen = [GpuCondition(ECC, float(more), f"{reading.device}: {more} more ECC errors that could not be corrected")]
    # Fewer than before: the driver was reloaded and counts from 0.
    return replace(health, uncorrected=now), seen if more > 0 else []


def _heat(health: GpuHistory, reading: Reading, now: float, patience_s: float) -> tuple[GpuHistory, list[GpuCondition]]:
    if not reading.hot:
        over = [GpuCondition(COOL, reading.temperature_c, f"{reading.device} runs at its own clocks again")]
        return replace(health, hot_since=None, told_heat=False), over if health.told_heat else []
    since = now if health.hot_since is None else health.hot_since
    if health.told_heat or now - since < patience_s:
        return replace(health, hot_since=since), []
    why = f"{reading.device} is held down for {now - since:.0f} s: {', '.join(reading.hot)}"
    return replace(health, hot_since=since, told_heat=True), [GpuCondition(HEAT, reading.temperature_c, why)]
