"""Writes a worker's share of checkpoints behind the back of its training steps.

Enters: ``take`` on the main thread, at a step boundary; only its copy delays the step. Leaves: chunks, a part and perhaps the
manifest in the first store, events, and from there the same in the durable one (``copier.py``). The worker owns one for the life
of its process.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from blake3 import blake3

from craft.protocol.errors import ConfigError
from craft.protocol.events import AnyNote, CheckpointFailed, CheckpointWritten
from craft.snapshots.cutting import Chunk, assign, cut
from craft.snapshots.entries import Entry
from craft.snapshots.manifest import Manifest, Numbered, Part, Ref
from craft.snapshots.memory import carve, room, view_of
from craft.snapshots.pace import lower_priority, retry_after
from craft.snapshots.portable import Header, State, encode_header
from craft.snapshots.publish import in_parallel, write_share
from craft.snapshots.reserve import Reserve
from craft.snapshots.store import Adding
from craft.snapshots.tiers import Tiers

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


class Place(NamedTuple):
    """Which checkpoint, and which share of it; the same on all members but for ``part``."""

    name: str
    """Of ``manifest.name_of``."""
    branch: int
    step: int
    """Committed steps that are in it."""
    generation: int
    tag: str | None
    part: int
    of: int


class Last(NamedTuple):
    """What was taken last, as far as this worker knows."""

    place: Place
    written: bool
    """This worker's share is in the first store."""
    complete: bool
    """Seen in the list of the first store. Another member may have brought it there without this one's knowing."""


class _Taken(NamedTuple):
    place: Place
    header: Header
    chunks: list[tuple[int, memoryview]]
    """Their numbers and bytes."""
    time: float


class Writer:
    """``keep`` is the number of checkpoints without a tag that stay. ``on_event`` is called on threads of the writer."""

    def __init__(self, tiers: Tiers, worker_id: str, keep: int, on_event: Callable[[AnyNote], None]) -> None:
        self._store = tiers.nearest_first[0]
        self._worker_id = worker_id
        self._keep = keep
        self._on_event = on_event
        self.stall_s = 0.0
        """How long the last ``take`` held the main thread up."""
        self.write_s = 0.0
        """How long the last share took from there until it was in the first store."""
        self._memory: mmap.mmap | None = None
        self._reserve: Reserve | None = None
        self._cut: tuple[tuple[Entry, ...], Sequence[Chunk]] = ((), ())
        # Guards what follows: the main thread takes, the writer's thread writes.
        self._change = threading.Condition()
        self._taken: _Taken | None = None
        self._last: Last | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="craft-writer", daemon=True)
        self._thread.start()

    # On the main thread.

    @property
    def busy(self) -> bool:
        """Whether the last share is still being written to the first store: nothing can be taken meanwhile."""
        with self._change:
            return self._taken is not None

    @property
    def last(self) -> Last | None:
        with self._change:
            return self._last

    def prepare(self, header: Header, part: int, of: int) -> None:
        """Make room for this share, in the background, so that the next ``take`` only has to copy."""
        size = sum(self._chunks(header.entries)[number].size for number in self._numbers(header.entries, part, of))
        if not self.busy and (self._memory is None or len(self._memory) < size):
            # First the old memory goes, or there would be twice as much.
            self._memory = None
            self._reserve = Reserve(size)

    def take(self, state: State, place: Place) -> None:
        """Copy this worker's share of ``state``; it is written while training goes on."""
        if self.busy:
            raise ConfigError(f"checkpoint {place.name} was taken while the one before it is still being written")
        begin = time.perf_counter()
        chunks = self._chunks(state.header.entries)
        numbers = self._numbers(state.header.entries, place.part, place.of)
        out = self._room(sum(chunks[number].size for number in numbers))
        copied: list[tuple[int, memoryview]] = []
        view, filled = view_of(out), 0
        for number in numbers:
            first = filled
            for start, end in chunks[number].ranges:
                state.copy(start, end, out[filled : filled + end - start])
                filled += end - start
            copied.append((number, view[first:filled]))
        with self._change:
            self._taken = _Taken(place, state.header, copied, time.time())
            self._last = Last(place, written=False, complete=False)
            self._change.notify_all()
        self.stall_s = time.perf_counter() - begin

    def wait(self, timeout_s: float) -> bool:
        """Wait until what was taken is written, and listed if this was the last share, in every tier; whether it is."""
        with self._change:
            return self._change.wait_for(lambda: self._taken is None, timeout_s)

    def close(self) -> None:
        """End the threads. What has been taken and is not written yet is given up."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(_CLOSE_S)

    def _chunks(self, entries: tuple[Entry, ...]) -> Sequence[Chunk]:
        if entries != self._cut[0]:
            self._cut = (entries, cut(entries))
        return self._cut[1]

    def _numbers(self, entries: tuple[Entry, ...], part: int, of: int) -> list[int]:
        if not 0 <= part < of:
            raise ConfigError(f"there is no share {part} of {of}")
        return assign(self._chunks(entries), of)[part]

    def _room(self, size: int) -> torch.Tensor:
        """Memory that was used before, or was set aside, where that is enough."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            self._memory = reserve.take(size)
        elif self._memory is None or len(self._memory) < size:
            self._memory = None
            self._memory = room(size)
        assert self._memory is not None
        # A data loader's process would otherwise share it, and the first touch of each page would cost a copy again.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_DONTFORK)
        return carve(self._memory, 0, size)

    # On the writer's thread.

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._taken is not None or self._closed)
                taken = self._taken
                if self._closed or taken is None:
                    return
            part = self._persist(taken)
            with self._change:
                self.write_s = time.time() - taken.time
                self._last = Last(taken.place, part is not None, self._last is not None and self._last.complete)
                self._taken = None
                self._change.notify_all()
            del taken

    def _persist(self, taken: _Taken) -> Part | None:
        """Write a share, again and again if need be; None: that is given up."""
        tries = 0
        while True:
            try:
                part, manifest = write_share(self._store, self._worker_id, lambda adding: self._add(adding, taken))
            except Exception as error:  # noqa: BLE001  (the edge of a thread: it becomes an event)
                tries += 1
                retry_s = retry_after(tries)
                self._failed(taken.place, error, tries, retry_s)
                if retry_s is None or self._ended_within(retry_s):
                    return None
                continue
            if manifest is not None:
                self._listed(manifest, time.time() - taken.time)
            return part

    def _add(self, adding: Adding, taken: _Taken) -> Part:
        place = taken.place
        header = encode_header(taken.header)
        header_ref = Ref(blake3(header).hexdigest(), len(header))
        found: dict[int, Numbered] = {}
        new: list[int] = []

        def add(chunk: tuple[int, memoryview]) -> None:
            number, data = chunk
            ref = Ref(blake3(data).hexdigest(), len(data))
            found[number] = Numbered(number, ref.hash, ref.size)
            if adding.add(ref, data):
                new.append(ref.size)

        in_parallel(self._store, add, taken.chunks)
        if place.part == 0 and adding.add(header_ref, memoryview(header)):
            new.append(len(header))
        return Part(
            name=place.name,
            branch=place.branch,
            step=place.step,
            generation=place.generation,
            time=taken.time,
            tag=place.tag,
            part=place.part,
            of=place.of,
            header=header_ref,
            chunks=tuple(found[number] for number, _ in taken.chunks),
            new_bytes=sum(new),
        )

    def _listed(self, manifest: Manifest, seconds: float) -> None:
        with self._change:
            if self._last is not None:
                self._last = self._last._replace(complete=True)
        self._tell(
            CheckpointWritten(
                name=manifest.name,
                branch=manifest.branch,
                step=manifest.step,
                url=self._store.url,
                tag=manifest.tag,
                total_bytes=manifest.total_bytes,
                new_bytes=manifest.new_bytes,
                seconds=seconds,
            )
        )

    def _failed(self, place: Place, error: Exception, tries: int, retry_s: float | None) -> None:
        logger.warning("checkpoint %s was not written: %s", place.name, error)
        self._tell(
            CheckpointFailed(
                worker_id=self._worker_id,
                name=place.name,
                step=place.step,
                error=str(error) or repr(error),
                tries=tries,
                retry_s=retry_s,
            )
        )

    def _tell(self, event: AnyNote) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("nobody took the event %s", event)

    def _ended_within(self, seconds: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: self._closed, seconds)
