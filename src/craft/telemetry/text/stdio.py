"""Keep failing prints from ending a process: the reader may be gone, or the disk full."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Forgiving(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def forgive() -> None:
    """Make prints to standard output and error never fail."""
    sys.stdout = _stream(1, sys.stdout, "strict")
    sys.stderr = _stream(2, sys.stderr, "backslashreplace")


def open_standard_files() -> None:
    """Open standard files that this process was started without (``>&-``), or the next opened file would become one."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _stream(fd: int, before: TextIO | None, errors: str) -> io.TextIOWrapper:
    if before is not None:
        with contextlib.suppress(OSError):
            before.flush()
    raw = _Forgiving(fd, "wb", closefd=False)
    encoding = getattr(before, "encoding", None)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=True)
