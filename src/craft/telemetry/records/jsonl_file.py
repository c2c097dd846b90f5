"""Append-only record files: if a line cannot be written, the job goes on and the line is written later."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path

from craft.settings.files.private_files import append_private

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Lines kept while they cannot be written; beyond that, the oldest are dropped."""


class JsonlFile:
    """Appends lines to a file of which it is the only writer. Any thread may call it."""

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        """Why it cannot be written now; empty if it can."""
        self._path = path
        self._fd: int | None = None
        # Guards everything: one thread may add a line while another flushes.
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self.flush()

    def add(self, line: bytes) -> None:
        """Append a line, given without its end, after those that still wait."""
        with self._lock:
            self._waiting.append(line + b"\n")
            if len(self._waiting) > MAX_WAITING:
                # The first one may be half written.
                del self._waiting[1]
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines, as far as the disk takes them."""
        with self._lock:
            trouble = ""
            try:
                self._write()
            except OSError as error:
                trouble = trouble_of(self._path, error)
            log_change(self._path, self.trouble, trouble)
            self.trouble = trouble

    def _write(self) -> None:
        if self._fd is None:
            self._fd = append_to(self._path)
            if _is_torn(self._fd):
                # A power cut tore the last line: end it, so that it does not swallow the next one.
                self._waiting.appendleft(b"\n")
        while self._waiting:
            # One write call: a kill leaves the line complete or absent.
            written = os.write(self._fd, self._waiting[0])
            # A full disk may take only a part; the rest follows.
            if written == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][written:]

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def append_to(path: Path) -> int:
    """Open a private file for appending; make its folder if needed."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return append_private(path)


def _is_torn(fd: int) -> bool:
    """Return whether the last line has no end."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def trouble_of(path: Path, error: OSError) -> str:
    """Return why a file cannot be written, for people."""
    return f"{path} cannot be written: {error.strerror or error}"


def log_change(path: Path, before: str, now: str) -> None:
    """Log when a file becomes unwritable, and when it is writable again."""
    if now and not before:
        logger.error("%s. The job goes on; lines wait until they can be written", now)
    elif before and not now:
        logger.warning("%s can be written again", path)
