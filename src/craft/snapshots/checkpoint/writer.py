"""Write a worker's share of checkpoints in the background of its training steps.

Only the copy in ``take``, on the main thread at a step boundary, delays the step. A thread writes it to the first store, and
another from there to the durable one (``tier_copier.py``). The worker owns one for the life of its process.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
from blake3 import blake3

from craft.protocol.errors import ConfigError
from craft.protocol.events import AnyNote
from craft.snapshots.checkpoint.chunking import Chunk, assign, cut
from craft.snapshots.checkpoint.gc import apply_keep
from craft.snapshots.checkpoint.publish import CheckpointEvents, in_parallel, write_share
from craft.snapshots.checkpoint.tier_copier import TierCopier
from craft.snapshots.state.device_copy import Copied, PinnedMemory, hurry, uses_devices
from craft.snapshots.state.index import TensorEntry
from craft.snapshots.state.raw_memory import carve, room, view_of
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.state.serialized import Header, State, encode_header
from craft.snapshots.store.background import REST, insist, lower_priority
from craft.snapshots.store.local import Pin
from craft.snapshots.store.manifest import PLAIN_VERSION, VERSION, Manifest, Numbered, Part, PartOfPosition, Ref, seal
from craft.snapshots.store.store import Adding
from craft.snapshots.store.tiers import Tiers

_CLOSE_S = 10.0


class CheckpointShare(NamedTuple):
    """Which checkpoint, and which share of it; only ``part`` and ``place`` differ between members."""

    name: str
    """Of ``manifest.name_of``."""
    branch: int
    step: int
    """Committed steps in it."""
    generation: int
    tag: str | None
    part: int
    of: int
    place: PartOfPosition | msgspec.UnsetType = msgspec.UNSET
    """Its position in the replica, and its share there; unset where a replica is one worker."""

    @property
    def share(self) -> tuple[int, int]:
        """Which share of this worker's state it writes, and how many there are."""
        return (self.part, self.of) if self.place is msgspec.UNSET else (self.place.share, self.place.of_shares)


class Last(NamedTuple):
    """The last checkpoint taken, as far as this worker knows."""

    place: CheckpointShare
    written: bool
    """This worker's share is in the first store."""
    complete: bool
    """Seen in the list of the first store. Another member may have listed it without this one's knowledge."""


class _Taken(NamedTuple):
    place: CheckpointShare
    header: Header
    chunks: list[tuple[int, memoryview]]
    """Their numbers and bytes."""
    copied: Copied
    """Returns once the bytes have been copied."""
    time: float


class CheckpointWriter:
    """``keep`` is the number of checkpoints without a tag that stay. ``on_event`` is called on the writer's threads."""

    def __init__(self, tiers: Tiers, worker_id: str, keep: int, on_event: Callable[[AnyNote], None]) -> None:
        self._store = tiers.nearest_first[0]
        self._worker_id = worker_id
        self._keep = keep
        self._notes = CheckpointEvents(worker_id, on_event)
        self._local = tiers.local
        self._owner = tiers.owner if tiers.local is None else ""
        self._copier = (
            TierCopier(tiers.local, tiers.durable, worker_id, keep, self._notes, tiers.owner) if tiers.local else None
        )
        self.stall_s = 0.0
        """How long the last ``take`` delayed the main thread."""
        self.write_s = 0.0
        """How long the last share took from there to the first store."""
        self._memory: PinnedMemory | None = None
        self._reserve: Reserve | None = None
        self._cut: tuple[tuple[TensorEntry, ...], Sequence[Chunk]] = ((), ())
        # Guards what follows: the main thread takes, the writer's thread writes.
        self._change = threading.Condition()
        self._taken: _Taken | None = None
        self._last: Last | None = None
        self._tidying = False
        self._hurried = False
        """Whether the job waits for the current write."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="craft-writer", daemon=True)
        self._thread.start()

    # On the main thread.

    @property
    def busy(self) -> bool:
        """Whether the last share is still being written to the first store, so that none can be taken."""
        with self._change:
            return self._taken is not None

    @property
    def last(self) -> Last | None:
        with self._change:
            return self._last

    def prepare(self, header: Header, part: int, of: int) -> None:
        """Allocate memory for this share in the background, so that the next ``take`` only has to copy."""
        size = sum(self._chunks(header.entries)[number].size for number in self._numbers(header.entries, part, of))
        there = max(len(self._memory) if self._memory else 0, self._reserve.size if self._reserve else 0)
        if not self.busy and there < size:
            # Free the old memory first, or there would be twice as much.
            self._memory = None
            self._reserve = Reserve(size)

    def take(self, state: State, place: CheckpointShare) -> None:
        """Copy this worker's share of ``state``; it is written while training goes on."""
        if self.busy:
            raise ConfigError(f"checkpoint {place.name} was taken while the previous one is still being written")
        begin = time.perf_counter()
        chunks = self._chunks(state.header.entries)
        numbers = self._numbers(state.header.entries, *place.share)
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
            self._taken = _Taken(place, state.header, copied, state.copied(gently=True), time.time())
            self._last = Last(place, written=False, complete=False)
            self._hurried = False
            self._change.notify_all()
        self.stall_s = time.perf_counter() - begin

    def wait_free(self, timeout_s: float) -> bool:
        """Wait until the next one can be taken: the last one is in the first store, or given up; return whether it is.

        It does not wait for other tiers: members that have taken the next one may skip this one there.
        """
        hurry()
        with self._change:
            self._hurried = True
            self._change.notify_all()
            return self._change.wait_for(lambda: self._taken is None and not self._tidying, timeout_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the last share is written, and listed if it completes the checkpoint, in every tier; return whether."""
        give_up = time.monotonic() + timeout_s
        if not self.wait_free(timeout_s):
            return False
        return self._copier is None or self._copier.wait(give_up - time.monotonic())

    def close(self) -> None:
        """End the threads; give up what has been taken and is not written yet."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(_CLOSE_S)
        if self._copier is not None:
            self._copier.close()

    def _chunks(self, entries: tuple[TensorEntry, ...]) -> Sequence[Chunk]:
        if entries != self._cut[0]:
            self._cut = (entries, cut(entries))
        return self._cut[1]

    def _numbers(self, entries: tuple[TensorEntry, ...], part: int, of: int) -> list[int]:
        if not 0 <= part < of:
            raise ConfigError(f"there is no share {part} of {of}")
        return assign(self._chunks(entries), of)[part]

    def _room(self, size: int) -> torch.Tensor:
        """Return memory that was used or reserved before, if it suffices; otherwise allocate."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            self._memory = reserve.take(size)
        elif self._memory is None or len(self._memory) < size:
            self._memory = None
            self._memory = room(size)
            if uses_devices():
                # Once: it is reused for every checkpoint.
                self._memory.pin()
        assert self._memory is not None
        # Not inherited by forked data loaders, or the first write to each page would copy it again.
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
            taken.copied()
            found = self._persist(taken)
            complete = found is not None and found[1] is not None
            with self._change:
                self.write_s = max(0.0, time.time() - taken.time)
                self._last = Last(taken.place, found is not None, complete)
                # In the fast store of one of several hosts nothing is ever complete, and garbage accumulates all the same.
                self._tidying = complete or self._copier is not None
                self._taken = taken = None
                self._change.notify_all()
            if self._tidying:
                apply_keep(self._store, self._keep)
            with self._change:
                self._tidying = False
                self._change.notify_all()

    def _persist(self, taken: _Taken) -> tuple[Part, Manifest | None] | None:
        """Write a share, with retries; None: given up."""
        place = taken.place
        found = insist(
            lambda: self._try(taken),
            lambda error, tries, retry_s: self._notes.failed(place.name, place.step, error, tries, retry_s),
            self._ended,
            lambda: self._hurried,
        )
        if found is not None and (manifest := found[1]) is not None:
            self._notes.written(manifest, self._store.url, time.time() - taken.time)
        return found

    def _try(self, taken: _Taken) -> tuple[Part, Manifest | None]:
        pins: list[Pin] = []

        def write(adding: Adding) -> Part:
            part = self._add(adding, taken)
            if self._local is not None:
                # Before another process can list it here, and remove it for a newer one.
                pins.append(self._local.pin(seal(part)))
            return part

        try:
            part, manifest = write_share(self._store, self._worker_id, write, self._owner)
        except BaseException:
            for pin in pins:
                pin.release()
            raise
        if self._copier is not None:
            self._copier.offer(part, pins[0])
        return part, manifest

    def _add(self, adding: Adding, taken: _Taken) -> Part:
        header = encode_header(taken.header)
        header_ref = Ref(blake3(header).hexdigest(), len(header))
        found: dict[int, Numbered] = {}
        new: list[int] = []

        def add(chunk: tuple[int, memoryview]) -> None:
            number, data = chunk
            began = time.perf_counter()
            ref = Ref(blake3(data).hexdigest(), len(data))
            found[number] = Numbered(number, ref.hash, ref.size)
            if adding.add(ref, lambda: data):
                new.append(ref.size)
            if taken.header.on_device:
                self._rest(REST * (time.perf_counter() - began))

        in_parallel(self._store, add, taken.chunks)
        if taken.place.share[0] == 0 and adding.add(header_ref, lambda: memoryview(header)):
            new.append(len(header))
        return Part(
            version=PLAIN_VERSION if taken.place.place is msgspec.UNSET else VERSION,
            **taken.place._asdict(),
            time=taken.time,
            header=header_ref,
            chunks=tuple(found[number] for number, _ in taken.chunks),
            new_bytes=sum(new),
        )

    def _rest(self, seconds: float) -> None:
        """Leave cores and memory to training for a while, unless the job waits for this checkpoint."""
        with self._change:
            self._change.wait_for(lambda: self._hurried or self._closed, seconds)

    def _ended(self, seconds: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: self._closed, seconds)
