"""Write and read the journal: one line of JSON for every event, action and outcome."""

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
    """Appends lines to ``journal.jsonl`` and passes each to the listeners. One thread owns it."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._record = JsonlFile(path)
        self._now = now
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call ``listener`` with every line from now on; return a function that ends this."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def write(self, kind: str, value: msgspec.Struct | dict[str, Any], **more: Any) -> None:
        """Append one line: ``kind`` is event, action or outcome. The value's ``time`` is stored as ``seen``."""
        fields = dict(value) if isinstance(value, dict) else msgspec.to_builtins(value)
        if "time" in fields:
            # ``time`` is when the line was written, so that lines are ordered by it.
            fields["seen"] = fields.pop("time")
        line = {"time": round(self._now(), 6), "kind": kind, **fields, **more}
        self._record.add(json.dumps(line, separators=(",", ":")).encode())
        for listener in list(self._listeners):
            listener(line)

    def close(self) -> None:
        self._record.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a ``.jsonl`` file; other lines are left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from parsed(line for line in file if line.endswith(b"\n"))


def parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in ``lines``; other lines are left out."""
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def last_lines(path: Path, number: int, kind: type[T]) -> list[T]:
    """Return the last complete lines of a ``.jsonl`` file, as far as they are in its last 64 KB and valid."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    # The text after the last line end is still being written; that before the first one may be half a line.
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
    """Follows a ``.jsonl`` file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the lines added since the last call; one that is still being written comes next time."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
        except OSError:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[0]
        if not complete:
            return []
        self._offset += len(complete) + 1
        return list(parsed(complete.split(b"\n")))
