"""The journal: one line of JSON for everything that happened, was decided and was done."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec


class Journal:
    """Appends lines to ``journal.jsonl`` and hands each to whoever listens. One thread owns it."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._now = now
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call ``listener`` with every line from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def write(self, kind: str, value: msgspec.Struct | dict[str, Any], **more: Any) -> None:
        """Append one line: ``kind`` is event, decision, action or outcome."""
        fields = value if isinstance(value, dict) else msgspec.to_builtins(value)
        line = {"time": round(self._now(), 6), "kind": kind, **fields, **more}
        # One write call: a line is there whole or not at all, whatever is killed.
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        for listener in list(self._listeners):
            listener(line)

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ``.jsonl`` file; a torn last line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
