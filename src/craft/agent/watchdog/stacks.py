"""Asks a worker's process for the stacks of its threads, and puts them into its log.

``worker/report/stacks.py`` has registered the handler that answers. A process that cannot answer (stopped by a signal, without
a handler, stuck in the kernel) is described by what the kernel says about it instead. Called by ``watch.examine``.
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
"""A file that did not grow for so many looks in a row is taken for whole; the handler does not say where it ends."""
_MAX_CHILDREN = 4
_CUT = "... (cut)\n"


class StackRequest(msgspec.Struct, frozen=True):
    """A process that was asked for its stacks."""

    pid: int
    path: Path
    before: int
    """Size of the file before it wrote to it."""
    why: str | None
    """Why it will not answer, if so."""


async def dump(pid: int, path: Path, limit_s: float = _LIMIT_S) -> str:
    """Return the stacks of a worker and of what it forked, at most 16 KB; ``path`` is where its handler writes.

    Each process has ``limit_s`` to answer. The event loop is never blocked.
    """
    return await collect(ask(pid, path), limit_s)


def ask(pid: int, path: Path) -> StackRequest:
    """Have a process write its stacks, at once: whatever it does next is not in them any more."""
    before, why = _size(path), _cannot_answer(pid)
    if why is None:
        try:
            os.kill(pid, STACKS_SIGNAL)
        except ProcessLookupError:
            why = "the process is gone"
    return StackRequest(pid, path, before, why)


async def collect(asked: StackRequest, limit_s: float = _LIMIT_S) -> str:
    """Return what a worker that was asked has written, and the stacks of what it forked."""
    return await with_children(await _written(asked, limit_s), asked.pid, asked.path, limit_s)


async def with_children(own: str, pid: int, path: Path, limit_s: float = _LIMIT_S) -> str:
    """The stacks of a worker, with those of what it forked. Each of these is asked by a signal."""
    parts = [own]
    for child in procfs.children(pid)[:_MAX_CHILDREN]:
        # A main thread that waits for its data-loader process says nothing about why that does not answer.
        parts.append(f"its child process {child}:\n{await _written(ask(child, path), limit_s)}")
    # What matters most comes first in the text, and is last in a worker's own part: its main thread.
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
    """Wait until the file has grown beyond ``before`` and grows no more; False if it did not grow within the limit."""
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
    """The end of the text, from the beginning of a line."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    return _CUT + data[-(max_bytes - len(_CUT)) :].decode(errors="ignore").partition("\n")[2]


def append_to_log(path: Path, heading: str, text: str) -> None:
    """Put a dump at the end of a worker's log, in one write: the worker may be writing, too."""
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
        # What is done about the worker does not depend on it.
        logger.error("stacks cannot be written to %s: %s", path, error)
