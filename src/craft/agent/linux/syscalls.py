"""Wrap the Linux system calls that Python lacks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_INFO = struct.Struct("=QQ11Ii")
"""The first version of struct pidfd_info: the mask that is asked for and answered, other fields, the exit status."""
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_WITH_STATUS = 1 << 3
_STATUS_FIELD = 49
"""The field of ``/proc/PID/stat``, counted from the state, that has what ``wait`` would return."""


def end_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends; die now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill what a worker forked. Each worker leads a process group; its number is not reused while members live."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def children() -> list[int]:
    """Return the process ids of the direct children of this (single-threaded) process."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def how_it_ended(pid: int, pidfd: int) -> tuple[int | None, int | None]:
    """Return (exit code, signal) of an ended process that is not our child; (None, None) if unknown.

    Until its parent reaps it, ``/proc`` has the status; afterwards its pidfd does, since Linux 6.15.
    """
    status = _status_of_zombie(pid)
    if status is None:
        status = _status_kept(pidfd)
    if status is None:
        return None, None
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


def _status_of_zombie(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 2 :].split()
    # In any other state it is a new process with the same number.
    return int(fields[_STATUS_FIELD]) if fields[0] == b"Z" else None


def _status_kept(pidfd: int) -> int | None:
    room = bytearray(_INFO.pack(_WITH_STATUS, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, room)
    except OSError:
        return None
    answered, *_, status = _INFO.unpack(room)
    return status if answered & _WITH_STATUS else None


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
