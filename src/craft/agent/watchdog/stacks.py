"""Ask a worker's process for the stacks of its threads, and append them to its log.

``worker/report/stacks.py`` registers the handler that answers. For a process that cannot answer (stopped by a signal, without
a handler, stuck in the kernel), the kernel's view takes their place. ``Watchdog.examine`` and ``WorkerInspector`` call this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import msgspec

from craft.agent.linux import procfs
from craft.settings.files.private_files import append_private
from craft.telemetry.text.plain_text import one_line
from craft.wire.activity import STACKS_SIGNAL

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024
_LIMIT_S = 0.5
_POLL_S = 0.02
_SETTLED_POLLS = 3
"""A file that did not grow for this many polls counts as complete; the handler writes no end marker."""
_MAX_CHILDREN = 4
_CUT = "... (cut)\n"


class StackRequest(msgspec.Struct, frozen=True):
    """A request to one process for its stacks."""

    pid: int
    path: Path
    before: int
    """Size of the file before the request."""
    why: str | None
    """Why it cannot answer, if it cannot."""


async def dump(pid: int, path: Path, limit_s: float = _LIMIT_S) -> str:
    """Return the stacks of a worker and its children, at most 16 KB; its handler writes to ``path``.

    Each process has ``limit_s`` to answer. This never blocks the event loop.
    """
    return await collect(ask(pid, path), limit_s)


def ask(pid: int, path: Path) -> StackRequest:
    """Make a process write its stacks at once, before it does anything else."""
    before, why = _size(path), _cannot_answer(pid)
    if why is None:
        try:
            os.kill(pid, STACKS_SIGNAL)
        except ProcessLookupError:
            why = "the process is gone"
    return StackRequest(pid, path, before, why)


async def collect(asked: StackRequest, limit_s: float = _LIMIT_S) -> str:
    """Return what an asked worker wrote, and the stacks of its children."""
    return await with_children(await _written(asked, limit_s), asked.pid, asked.path, limit_s)


async def with_children(own: str, pid: int, path: Path, limit_s: float = _LIMIT_S) -> str:
    """Return a worker's stacks with those of its children; a signal asks each child."""
    parts = [own]
    for child in procfs.children(pid)[:_MAX_CHILDREN]:
        # The stack of a main thread that waits for its data-loader process does not show why that hangs.
        parts.append(f"its child process {child}:\n{await _written(ask(child, path), limit_s)}")
    # The worker comes first. ``_bounded`` keeps the end of each part: the main thread comes last in it.
    share = MAX_BYTES // len(parts)
    return "\n".join(_bounded(part, share).rstrip("\n") for part in parts)


async def _written(asked: StackRequest, limit_s: float) -> str:
    why = asked.why
    if why is None:
        if await _settled(asked.path, asked.before, limit_s):
            return _since(asked.path, asked.before)
        why = f"no answer within {limit_s:g} s"
    return f"no Python stack: {why}\n{procfs.kernel_text(asked.pid)}"


def _cannot_answer(pid: int) -> str | None:
    state = procfs.state(pid)
    if state in ("", "Z", "X"):
        return "the process is gone"
    if state == "T":
        return "the process is stopped by a signal"
    if not procfs.catches(pid, STACKS_SIGNAL):
        return "the process has no handler that would write it"
    return None


async def _settled(path: Path, before: int, limit_s: float) -> bool:
    """Wait until the file has grown beyond ``before`` and stopped growing; return False if it did not grow in time."""
    deadline = time.monotonic() + limit_s
    size, same = before, 0
    while time.monotonic() < deadline and same < _SETTLED_POLLS:
        await asyncio.sleep(_POLL_S)
        last, size = size, _size(path)
        same = same + 1 if size == last and size > before else 0
    return size > before


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _since(path: Path, before: int) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(before, size - MAX_BYTES)
        file.seek(begin)
        text = file.read(MAX_BYTES).decode(errors="replace")
    return text if begin == before else _CUT + text.partition("\n")[2]


def _bounded(text: str, max_bytes: int) -> str:
    """Return the end of the text, from the beginning of a line."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    return _CUT + data[-(max_bytes - len(_CUT)) :].decode(errors="ignore").partition("\n")[2]


def append_to_log(path: Path, heading: str, text: str) -> None:
    """Append a dump to a worker's log in one write: the worker may be writing, too."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    dump = "\n".join(map(one_line, text.split("\n")))
    data = f"\n--- {stamp} craft: {one_line(heading)}\n{dump}\n--- end of stacks\n".encode()
    try:
        fd = append_private(path)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        # Only a record: the answer to the hang does not depend on it.
        logger.error("stacks cannot be written to %s: %s", path, error)
