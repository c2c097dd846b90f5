"""The journal as server-sent events: past lines, then every new one."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from craft.telemetry.records.journal import Journal, parsed
from craft.telemetry.records.journal_reader import as_record

MAX_WAITING = 10_000
"""Lines that a slow reader may lag behind; then its stream ends, and it reconnects with Last-Event-ID."""
KEEPALIVE_S = 15.0
_AT_ONCE = 1000


class EventStream:
    """Numbers the journal's lines from 1, across restarts, and sends them to any number of readers."""

    def __init__(self, journal: Journal, path: Path) -> None:
        self._path = path
        self._count = _count(path)
        self._readers: set[asyncio.Queue[tuple[int, str] | None]] = set()
        journal.listen(self._written)

    async def stream(self, after: int = 0, follow: bool = True) -> AsyncIterator[bytes]:
        """Yield server-sent events for the lines after number ``after``."""
        queue: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue(MAX_WAITING + 1)
        # No await between these two: every line is either counted here or comes through the queue.
        self._readers.add(queue)
        count = self._count
        try:
            with self._path.open("rb") as file:
                number = 0
                # A few at a time: a journal may be long, and have many readers.
                while some := await asyncio.to_thread(_some, file, min(_AT_ONCE, count - number)):
                    for line in some:
                        number += 1
                        if number > after and line is not None:
                            yield _event(number, line)
            while follow:
                try:
                    item = await asyncio.wait_for(queue.get(), KEEPALIVE_S)
                except asyncio.TimeoutError:
                    yield b": still here\n\n"
                    continue
                if item is None:
                    return
                if item[0] > after:
                    yield _event(*item)
        finally:
            self._readers.discard(queue)

    def close(self) -> None:
        """End all streams."""
        for queue in list(self._readers):
            self._end(queue)

    def _written(self, line: dict[str, Any]) -> None:
        self._count += 1
        text = json.dumps(line, separators=(",", ":"))
        for queue in list(self._readers):
            if queue.qsize() >= MAX_WAITING:
                self._end(queue)
            else:
                queue.put_nowait((self._count, text))

    def _end(self, queue: asyncio.Queue[tuple[int, str] | None]) -> None:
        # The queue always has room for its end.
        self._readers.discard(queue)
        queue.put_nowait(None)


def _event(number: int, line: str) -> bytes:
    return f"id: {number}\ndata: {line}\n\n".encode()


def _some(file: BinaryIO, number: int) -> list[str | None]:
    """Read so many lines; None for a damaged one, which keeps its number."""
    lines = [line.rstrip(b"\n") for line in itertools.islice(file, number)]
    return [line.decode() if any(map(as_record, parsed([line]))) else None for line in lines]


def _count(path: Path) -> int:
    """Return the number of complete lines."""
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file)
