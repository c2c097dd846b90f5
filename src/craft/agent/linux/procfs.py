"""Read the kernel's view of a process from ``/proc``; what is gone or forbidden reads as None or empty."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 1024


class ProcessGlance(msgspec.Struct, frozen=True):
    """The part of a process's state that is read within microseconds."""

    state: str
    """The kernel's letter for the main thread: R running, S sleeping, D uninterruptible, T stopped, t traced, Z dead."""
    main_cpu_s: float
    """CPU time of the main thread since it began."""
    cpu_s: float
    """CPU time of all threads."""
    num_threads: int


class ProcessFiles:
    """Open ``/proc`` files of one process. They never show a later process with the same number."""

    def __init__(self, pid: int) -> None:
        """Raise ``OSError`` if there is no such process."""
        self._whole = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            self._main = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY)
        except OSError:
            os.close(self._whole)
            raise

    def glance(self) -> ProcessGlance | None:
        """Return the current state; None once the process is gone."""
        try:
            whole = _fields(os.pread(self._whole, _STAT_BYTES, 0))
            main = _fields(os.pread(self._main, _STAT_BYTES, 0))
        except ProcessLookupError:
            return None
        if not whole or not main:
            return None
        return ProcessGlance(main[0].decode(), _cpu_s(main), _cpu_s(whole), int(whole[17]))

    def close(self) -> None:
        os.close(self._whole)
        os.close(self._main)


def _fields(stat: bytes) -> list[bytes]:
    """Return the fields from the state on; the name before it may have spaces and brackets."""
    return stat[stat.rfind(b")") + 2 :].split()


def _cpu_s(fields: list[bytes]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def wchan(pid: int) -> str:
    """Return the kernel function that the main thread sleeps in; empty if it runs or the kernel does not say."""
    name = _read(pid, "wchan")
    return "" if name == "0" else name


def kernel_text(pid: int) -> str:
    """Return all that the kernel says about where the main thread is; only root can read the kernel stack."""
    lines = [f"{name}: {text}" for name in ("wchan", "syscall") if (text := _read(pid, name))]
    if stack := _read(pid, "stack"):
        lines += ["kernel stack:", stack]
    return "\n".join(lines)


def is_traced(pid: int) -> bool:
    """Return whether a debugger is attached."""
    return _status(pid, "TracerPid") not in ("", "0")


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal; without one, many signals would end it."""
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def state(pid: int) -> str:
    """Return the kernel's letter for its state; empty if there is no such process."""
    return _status(pid, "State")[:1]


def children(pid: int) -> list[int]:
    """Return the process ids of its children, forked by any of its threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return sorted(int(child) for thread in threads for child in _read(pid, f"task/{thread}/children").split())


def _status(pid: int, name: str) -> str:
    for line in _read(pid, "status").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
    except OSError:
        return ""
