"""Measure this host without torch: processors, memory, files, ports, loopback, disk, clock, tokens.

In: a folder and token files. Out: a ``Machine``, for ``craft doctor``. Takes about a second.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from craft.doctor.findings import Machine, TokenFile

_SHARED = Path("/dev/shm")
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_LOOPBACK_BYTES, _DISK_BYTES = 128 << 20, 64 << 20
_PIECE = 1 << 20
_LIMIT_S = 20.0
_TIME_ERROR = 5
"""Returned by ``adjtimex`` if the clock is not synchronised."""


def measure(folder: Path, tokens: Iterable[Path], gpu_health: str | None) -> Machine:
    """Measure this host; ``folder`` is where run directories and checkpoints would be."""
    return Machine(
        python=platform.python_version(),
        cpus=_cpus(),
        memory_bytes=psutil.virtual_memory().available,
        shared_bytes=shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        pidfd=hasattr(os, "pidfd_open"),
        synchronised=_synchronised(),
        ports=_ports(),
        loopback_mb_s=_loopback_mb_s(),
        folder=str(folder),
        folder_free_bytes=shutil.disk_usage(folder).free if folder.is_dir() else None,
        folder_mb_s=_folder_mb_s(folder),
        tokens=tuple(_token(path) for path in tokens),
        gpu_health=gpu_health,
    )


def _cpus() -> float:
    allowed = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = _QUOTA.read_text().split()
        return min(allowed, int(quota) / int(period))
    except (OSError, ValueError):
        # No control group, or one without a limit ("max").
        return allowed


def _synchronised() -> bool | None:
    # The call fills a struct of about 200 bytes; zeroed, it only reads.
    asked = ctypes.create_string_buffer(512)
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(asked)
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR


def _ports() -> int | None:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
        low, high = map(int, _PORTS.read_text().split())
    except (OSError, ValueError):
        return None
    return high - low + 1


def _loopback_mb_s() -> float | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return _through(server)
    except OSError:
        return None


def _through(server: socket.socket) -> float:
    """Send to this process from another thread, and time the receiving."""

    def send() -> None:
        piece = bytes(_PIECE)
        with socket.create_connection(server.getsockname(), _LIMIT_S) as connection:
            for _ in range(_LOOPBACK_BYTES // _PIECE):
                connection.sendall(piece)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    server.settimeout(_LIMIT_S)
    connection, _ = server.accept()
    with connection:
        connection.settimeout(_LIMIT_S)
        room, count, began = bytearray(_PIECE), 0, time.monotonic()
        while count < _LOOPBACK_BYTES and (got := connection.recv_into(room)):
            count += got
        seconds = time.monotonic() - began
    thread.join()
    return count / 1e6 / seconds


def _folder_mb_s(folder: Path) -> float | None:
    # Not all zeros: some file systems would not write those.
    piece = os.urandom(_PIECE)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            for _ in range(_DISK_BYTES // _PIECE):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return _DISK_BYTES / 1e6 / (time.monotonic() - began)
    except OSError:
        return None


def _token(path: Path) -> TokenFile:
    status = path.stat()
    return TokenFile(path=str(path), mode=status.st_mode & 0o7777, own=status.st_uid == os.getuid())
