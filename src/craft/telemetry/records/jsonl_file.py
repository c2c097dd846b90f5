"""Files of lines that are records of a job: where one cannot be written, the job goes on, and it is written later."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path

from craft.settings.files.private_files import append_private

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Lines that are kept while they cannot be written; of more, the oldest are left out."""


class JsonlFile:
    """Appends lines to a file of which it is the only writer. Any thread may call it."""

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        """Why it cannot be written now; empty: it can."""
        self._path = path
        self._fd: int | None = None
        # Guards all of this: one thread may add a line while another writes what waits.
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self.flush()

    def add(self, line: bytes) -> None:
        """Append a line, behind those that are still waiting; one without its end."""
        with self._lock:
            self._waiting.append(line + b"\n")
            if len(self._waiting) > MAX_WAITING:
                # The first one may be half written.
                del self._waiting[1]
            self.flush()

    def flush(self) -> None:
        """Write what is waiting, as far as there is room for it."""
        with self._lock:
            trouble = ""
            try:
                self._write()
            except OSError as error:
                trouble = trouble_of(self._path, error)
            say_once(self._path, self.trouble, trouble)
            self.trouble = trouble

    def _write(self) -> None:
        if self._fd is None:
            self._fd = append_to(self._path)
            if _is_torn(self._fd):
                # A power cut tore the last line: end it, so that it does not swallow the next one.
                self._waiting.appendleft(b"\n")
        while self._waiting:
            # One write call: a line is there whole or not at all, whatever is killed.
            written = os.write(self._fd, self._waiting[0])
            # A full disk takes a part of it; the rest follows.
            if written == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][written:]

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def append_to(path: Path) -> int:
    """Open a private file to append to; its folder is made."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return append_private(path)


def _is_torn(fd: int) -> bool:
    """Whether the last line has no end."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def trouble_of(path: Path, error: OSError) -> str:
    """Why a file cannot be written, for people."""
    return f"{path} cannot be written: {error.strerror or error}"


def say_once(path: Path, before: str, now: str) -> None:
    """Log that a file cannot be written when that begins, and when it is over."""
    if now and not before:
        logger.error("%s. The job goes on, and lines wait until they can be written", now)
    elif before and not now:
        logger.warning("%s can be written again", path)
