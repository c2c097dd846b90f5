"""The journal: one line of JSON for everything that happened, was decided and was done."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from craft.telemetry.records.jsonl_file import JsonlFile

T = TypeVar("T")

_TAIL_BYTES = 65536


class Journal:
    """Appends lines to ``journal.jsonl`` and hands each to whoever listens. One thread owns it."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._record = JsonlFile(path)
        self._now = now
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call ``listener`` with every line from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def write(self, kind: str, value: msgspec.Struct | dict[str, Any], **more: Any) -> None:
        """Append one line: ``kind`` is event, action or outcome. A value's own time is kept as ``seen``."""
        fields = dict(value) if isinstance(value, dict) else msgspec.to_builtins(value)
        if "time" in fields:
            # ``time`` is when the line was written, so that lines are in the order of their times.
            fields["seen"] = fields.pop("time")
        line = {"time": round(self._now(), 6), "kind": kind, **fields, **more}
        self._record.add(json.dumps(line, separators=(",", ":")).encode())
        for listener in list(self._listeners):
            listener(line)

    def close(self) -> None:
        self._record.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ``.jsonl`` file; what is not a whole JSON object is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from parsed(line for line in file if line.endswith(b"\n"))


def parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what is in ``lines``, without those that are not JSON objects."""
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def last_lines(path: Path, number: int, kind: type[T]) -> list[T]:
    """Return the last whole lines of a ``.jsonl`` file, as far as they are in its last 64 KB; what is no line is left out."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    # What is behind the last line end is still being written; what is before the first one may be half a line.
    found: list[T] = []
    for line in reversed(lines[:-1]):
        try:
            found.append(msgspec.json.decode(line, type=kind, strict=False))
        except (msgspec.DecodeError, UnicodeError):
            break
        if len(found) == number:
            break
    return found[::-1]


class Tail:
    """Follows a ``.jsonl`` file that somebody else writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the lines that are there since the last call; one that is still being written comes next time."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
        except OSError:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return list(parsed(whole.split(b"\n")))
