"""Follow the log of a worker while it grows: bytes of the file in, complete lines of the script out.

``craft run`` shows them on the terminal (``cli/output/tee.py``). The file stays unchanged. Memory is bounded: a long line is
cut, and if more arrives than a terminal can show, the older part is left out and counted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MAX_LINE_BYTES = 8192
MAX_NEW_BYTES = 1 << 17
"""If more than this has arrived since the last read, only its end is shown:"""
KEPT_BYTES = 8192
"""this much of it."""
PARTIAL_S = 1.0
"""A line without an end is shown once it has not grown for this long."""
BAR_S = 10.0
"""A line that overwrites itself with carriage returns, such as a progress bar, is shown this often."""
_CHUNK_BYTES = 1 << 20


class LogTail:
    """Returns the lines of a log that are new since the last call. One thread owns it."""

    def __init__(self, path: Path, offset: int = 0, name: str = "") -> None:
        """Begin at ``offset``, in bytes; ``name`` stands for the file in messages."""
        self.offset = offset
        """Where the next call continues."""
        self._path = path
        self._name = name or str(path)
        self._pending = b""
        """The beginning of a line whose end has not arrived yet."""
        self._is_bar = False
        self._grown_at: float | None = None
        self._shown_at: float | None = None
        """When a part of the pending line was shown, if one was."""
        self._skips_line = False
        """The rest of the current line is left out."""

    def read(self, now: float, *, final: bool = False, max_bytes: int = MAX_NEW_BYTES) -> list[bytes]:
        """Return lines without their ends; ``final``: the file does not grow any more, so return an unfinished one, too."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            size = os.fstat(fd).st_size
            lines = []
            if size - self.offset > max_bytes:
                lines += self._leave_out(fd, max(self.offset, size - KEPT_BYTES))
            data = os.pread(fd, max(0, size - self.offset), self.offset)
        finally:
            os.close(fd)
        self.offset += len(data)
        if data:
            self._grown_at = now
            lines += self._take(data, now)
        lines += self._unfinished(now, final)
        return lines

    def _leave_out(self, fd: int, end: int) -> list[bytes]:
        """Skip everything before ``end`` and the line that contains it; return a line that says so."""
        # The line that contains ``end`` counts as left out, unless it was counted before.
        number = 0 if self._skips_line else 1
        while self.offset < end:
            data = os.pread(fd, min(_CHUNK_BYTES, end - self.offset), self.offset)
            if not data:
                break
            number += data.count(b"\n")
            self.offset += len(data)
        self._pending, self._shown_at, self._skips_line = b"", None, True
        if not number:
            return []
        return [f"... {number} {'line' if number == 1 else 'lines'} left out, see {self._name}".encode()]

    def _take(self, data: bytes, now: float) -> list[bytes]:
        if self._skips_line:
            _, end, data = data.partition(b"\n")
            self._skips_line = not end
        *complete, rest = (self._pending + data).split(b"\n")
        self._pending = b""
        lines = []
        for line in complete:
            line = _overwritten(line)
            # A part of it was shown already: its end alone is not a line.
            if line or self._shown_at is None:
                lines.append(self._cut(line))
            self._shown_at = None
        if rest:
            self._is_bar = b"\r" in rest
            rest = _overwritten(rest)
        if len(rest) > MAX_LINE_BYTES:
            self._skips_line = True
            return [*lines, self._cut(rest)]
        self._pending = rest
        return lines

    def _cut(self, line: bytes) -> bytes:
        if len(line) <= MAX_LINE_BYTES:
            return line
        return line[:MAX_LINE_BYTES] + f" ... (the line goes on in {self._name})".encode()

    def _unfinished(self, now: float, final: bool) -> list[bytes]:
        if not self._pending.strip():
            return []
        assert self._grown_at is not None
        since = self._shown_at if self._is_bar and self._shown_at is not None else self._grown_at
        if not final and now - since < (BAR_S if self._is_bar else PARTIAL_S):
            return []
        cut = len(self._pending) if final else _decodable(self._pending)
        line, self._pending = self._pending[:cut], self._pending[cut:]
        self._shown_at = now
        return [line] if line else []


def _overwritten(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns: the text after the last one."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _decodable(data: bytes) -> int:
    """Return how many of these bytes form complete UTF-8 characters."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead & 0xC0 != 0x80:
            length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return len(data) - back if length > back else len(data)
    return len(data)


_TIME = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d{3}"
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_OWN_LOG = re.compile(rf"\[?{_TIME}[\]\[ |:-]+craft(?:\.\w+)+[\]\[ |:-]+{_LEVEL}[\]\[ |:-]+")
_OWN_DUMP = re.compile(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d craft: ")
_DUMP_END = "--- end of stacks"
_TORCH = re.compile(r"\[[WE]\d{4} .*\] \[c10d\] |frame #\d+: |<omitting python frames>$|Exception raised from ")


class ScriptLines:
    """Filters out of a log what the script did not write: CRAFT's log lines, stack dumps, torch's connection errors.

    CRAFT's warnings and errors are kept, without time and module.
    """

    def __init__(self) -> None:
        self._in_dump = False

    def shown(self, line: str) -> str | None:
        """Return what is shown of a line; None: nothing."""
        if self._in_dump or _OWN_DUMP.match(line):
            self._in_dump = line != _DUMP_END
            return None
        if _TORCH.match(line):
            return None
        own = _OWN_LOG.search(line)
        if own is None:
            return line
        before, level = line[: own.start()], own["level"]
        if level not in ("DEBUG", "INFO"):
            return f"{before}craft {level.lower()}: {line[own.end() :]}"
        # The script had written the beginning of a line when another thread logged.
        return before if before.strip() else None
