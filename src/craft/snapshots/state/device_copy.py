"""Copy from device memory to the host while the device computes.

``donor.py`` and ``writer.py`` wait for copies on their threads. The worker calls ``hold_back`` before the script's update code
runs, because it may change bytes that are still being copied. Tensors on the CPU need none of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Bytes on a device, and memory for them on the host."""

_PIECE_BYTES = 16 << 20
"""Bytes copied at a time: other transfers wait less than a millisecond."""
_REST = 2.0
"""If nothing waits for them, pieces are this many times their duration apart: the exchange uses the same link."""

_streams: dict[torch.device, torch.cuda.Stream] = {}
_under_way: list[_Passage] = []
"""Owned by the main thread: copies beside a step that may not be on their stream yet."""


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the separate stream on which state is copied from or to a device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def hurry() -> None:
    """Copy the rest at full speed, because a thread waits for it. On the main thread."""
    for passage in _under_way:
        passage.hurry()


def hold_back() -> None:
    """Make the current stream wait for all copies that are under way."""
    hurry()
    while _under_way:
        _under_way.pop().await_begun()
    for device, stream in _streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)


class Copied(Protocol):
    """Returns once everything, or at least so many bytes from the first on, is on the host."""

    def __call__(self, size: int | None = None) -> None: ...


def at_once(size: int | None = None) -> None:
    """Return: there is nothing to wait for."""


class Copies:
    """Copies of one state. The main thread makes them; any thread may wait through what ``begin`` returns."""

    def __init__(self) -> None:
        self._steady: dict[torch.device, list[Pair]] = {}
        self._others: dict[torch.device, list[Pair]] = {}

    def add(self, source: torch.Tensor, out: torch.Tensor, *, steady: bool) -> None:
        """Queue a copy; ``steady``: only the script's update code changes ``source``, so that there is time until then."""
        (self._steady if steady else self._others).setdefault(source.device, []).append((source, out))

    def begin(self, *, gently: bool = False) -> Copied:
        """Begin all copies; return a function that waits for them. ``gently``: there is time until ``hold_back``."""
        steady, others = self._steady, self._others
        self._steady, self._others = {}, {}
        if not steady and not others:
            return at_once
        marks = [_copy_at_once(device, pairs) for device, pairs in others.items()]
        passages = [_Passage(device, pairs, gently=gently) for device, pairs in steady.items()]
        _under_way.extend(passages)

        def wait(size: int | None = None) -> None:
            for mark in marks:
                mark.synchronize()
            for passage in passages:
                passage.wait(size)

        return wait


def _copy_at_once(device: torch.device, pairs: Iterable[Pair]) -> torch.cuda.Event:
    stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        for source, out in pairs:
            out.copy_(source, non_blocking=True)
    return _mark(stream)


class _Passage:
    """Copies piece by piece on a separate stream, from a separate thread.

    All pieces at once would form a queue in which every other request of the training to the device has to wait.
    """

    def __init__(self, device: torch.device, pairs: Sequence[Pair], *, gently: bool) -> None:
        self._stream = stream_of(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # Held until they are copied: the memory of the sources must not be reused.
        self._pairs = pairs
        # Guards what follows.
        self._change = threading.Condition()
        self._copied = 0
        self._hurried = not gently
        self._begun = False
        self._over = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="craft-copy", daemon=True).start()

    def _run(self) -> None:
        try:
            before: tuple[torch.cuda.Event, int] | None = None
            size = 0
            for piece in _pieces(self._pairs):
                began = time.monotonic()
                size += sum(source.numel() for source, _ in piece)
                with torch.cuda.stream(self._stream):
                    for source, out in piece:
                        out.copy_(source, non_blocking=True)
                # One is under way while the next is prepared.
                before = self._reach(before, (_mark(self._stream), size))
                with self._change:
                    self._change.wait_for(lambda: self._hurried, _REST * (time.monotonic() - began))
            with self._change:
                self._begun = True
                self._change.notify_all()
            self._reach(before, None)
        except BaseException as error:  # noqa: BLE001  (the edge of a thread: the waiting thread raises it)
            self._error = error
        self._pairs = ()
        with self._change:
            self._begun = self._over = True
            self._change.notify_all()

    def _reach(
        self, before: tuple[torch.cuda.Event, int] | None, now: tuple[torch.cuda.Event, int] | None
    ) -> tuple[torch.cuda.Event, int] | None:
        """Wait for the piece before this one."""
        if before is not None:
            before[0].synchronize()
            with self._change:
                self._copied = before[1]
                self._change.notify_all()
        return now

    def hurry(self) -> None:
        """A thread waits from now on."""
        with self._change:
            self._hurried = True
            self._change.notify_all()

    def await_begun(self) -> None:
        """Wait until all copies are on the stream."""
        with self._change:
            self._change.wait_for(lambda: self._begun)

    def wait(self, size: int | None) -> None:
        """Wait until so many bytes, or all of them, are on the host."""
        with self._change:
            self._change.wait_for(lambda: self._over or (size is not None and self._copied >= size))
            if self._error is not None:
                raise self._error


def _pieces(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Divide bytes into pieces of about the same size, in order."""
    piece: list[Pair] = []
    size = 0
    for source, out in pairs:
        for part in zip(source.split(_PIECE_BYTES), out.split(_PIECE_BYTES), strict=True):
            piece.append(part)
            size += part[0].numel()
            if size >= _PIECE_BYTES:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a waiting thread sleeps instead of occupying a core.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class PinnedMemory(mmap.mmap):
    """Memory that can be pinned, so that a device accesses it directly, at several times the speed."""

    _pinned: int = 0

    @property
    def is_pinned(self) -> bool:
        return self._pinned != 0

    def pin(self) -> None:
        """Pin it all at once, because a copy must not cross two pieces. If the system does not allow it, it stays unpinned.

        Takes about as long as touching it: call it on a thread that has the time.
        """
        # Not inherited by data loaders, for which the kernel would copy it.
        with contextlib.suppress(OSError):
            self.madvise(mmap.MADV_DONTFORK)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if not self._pinned and int(torch.cuda.cudart().cudaHostRegister(begin, len(self), 0)) == 0:
            self._pinned = begin

    def __del__(self) -> None:
        # Before the memory is freed.
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)


def uses_devices() -> bool:
    """Return whether this process uses a device."""
    return bool(torch.cuda.is_initialized())


def own_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device of this worker's ``tensors``; None if they are on the CPU."""
    found = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return found or (torch.device("cuda", torch.cuda.current_device()) if uses_devices() else None)


def take_at_once(device: torch.device, size: int) -> None:
    """Make torch allocate so many bytes of device memory as one block, from which later allocations are served.

    Many small allocations would each wait for the device.
    """
    # Without a block that large, it allocates many after all.
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8, device=device)
