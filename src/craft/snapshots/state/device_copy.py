"""Copies from device memory to the host's, beside what the device computes.

Enters: pieces of tensors at a step boundary. Leaves: the same bytes on the host, a while later. ``serialized.py`` makes copies,
``donor.py`` and ``writer.py`` wait for them on their own threads. The worker calls ``hold_back`` before the script's update
code runs: what it is about to change may still be on its way. Nothing here is done for tensors on the CPU.
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
"""Bytes on a device, and room for them on the host."""

_PIECE_BYTES = 16 << 20
"""So many are copied at a time, and the next ones wait: less than a millisecond, for whoever comes in between."""
_REST = 2.0
"""Where nobody waits for them, pieces are so many times as far apart as one takes: the exchange uses the same link."""

_streams: dict[torch.device, torch.cuda.Stream] = {}
_under_way: list[_Passage] = []
"""The main thread's. What is copied beside a step, and may not be on its stream yet."""


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream beside all others on which state is copied, from a device or to it."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def hurry() -> None:
    """Somebody waits for what is being copied: what remains of it is copied at full speed. On the main thread."""
    for passage in _under_way:
        passage.hurry()


def hold_back() -> None:
    """Let the current stream wait until everything that is being copied has been."""
    hurry()
    while _under_way:
        _under_way.pop().await_begun()
    for device, stream in _streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)


class Copied(Protocol):
    """Returns once all that was to be copied is on the host, or at least so many bytes of it from its first."""

    def __call__(self, size: int | None = None) -> None: ...


def at_once(size: int | None = None) -> None:
    """There is nothing to wait for."""


class Copies:
    """Copies of one state. The main thread makes them; whoever has what ``begin`` returned may wait for them."""

    def __init__(self) -> None:
        self._steady: dict[torch.device, list[Pair]] = {}
        self._others: dict[torch.device, list[Pair]] = {}

    def add(self, source: torch.Tensor, out: torch.Tensor, *, steady: bool) -> None:
        """Copy with ``begin``; ``steady``: only the script's update code changes ``source``, so there is time until then."""
        (self._steady if steady else self._others).setdefault(source.device, []).append((source, out))

    def begin(self, *, gently: bool = False) -> Copied:
        """Begin all copies; what is returned waits for them. ``gently``: there is time until they are held back for."""
        steady, others = self._steady, self._others
        self._steady, self._others = {}, {}
        if not steady and not others:
            return at_once
        marks = [_copy_at_once(device, pairs) for device, pairs in others.items()]
        passages = [_Passage(device, pairs, gently=gently) for device, pairs in steady.items()]
        _under_way.extend(passages)
        return _Wait(marks, passages)


class _Wait:
    def __init__(self, marks: Sequence[torch.cuda.Event], passages: Sequence[_Passage]) -> None:
        self._marks = marks
        self._passages = passages

    def __call__(self, size: int | None = None) -> None:
        for mark in self._marks:
            mark.synchronize()
        for passage in self._passages:
            passage.wait(size)


def _copy_at_once(device: torch.device, pairs: Iterable[Pair]) -> torch.cuda.Event:
    stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        for source, out in pairs:
            out.copy_(source, non_blocking=True)
    return _mark(stream)


class _Passage:
    """Copies on a stream beside the others, a piece at a time, by a thread of its own.

    All of them at once would be a queue in which everything that the training wants to know of the device has to wait.
    """

    def __init__(self, device: torch.device, pairs: Sequence[Pair], *, gently: bool) -> None:
        self._stream = stream_of(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # Held until they are copied: nobody else may get the memory of the sources.
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
                # One is under way while the next is made ready.
                before = self._reach(before, (_mark(self._stream), size))
                with self._change:
                    self._change.wait_for(lambda: self._hurried, _REST * (time.monotonic() - began))
            with self._change:
                self._begun = True
                self._change.notify_all()
            self._reach(before, None)
        except BaseException as error:  # noqa: BLE001  (the edge of a thread: whoever waits raises it)
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
        """Somebody waits from now on."""
        with self._change:
            self._hurried = True
            self._change.notify_all()

    def await_begun(self) -> None:
        """Wait until all copies are on the stream."""
        with self._change:
            self._change.wait_for(lambda: self._begun)

    def wait(self, size: int | None) -> None:
        """Wait until so many bytes are on the host, or all of them."""
        with self._change:
            self._change.wait_for(lambda: self._over or (size is not None and self._copied >= size))
            if self._error is not None:
                raise self._error


def _pieces(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Cut bytes into pieces of about the same size, in their order."""
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
    # Blocking: who waits sleeps, instead of keeping a core busy that the training needs.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class PinnedMemory(mmap.mmap):
    """Memory that can be pinned, so that a device reads and writes it by itself, at several times the speed."""

    _pinned: int = 0

    @property
    def is_pinned(self) -> bool:
        return self._pinned != 0

    def pin(self) -> None:
        """Pin it, all at once: a copy must not cross two pieces. Where the system does not allow it, it stays as it is.

        Takes about as long as to touch it, and is for a thread that has the time.
        """
        # A data loader's process has no use for it, and the kernel would copy all of it for one.
        with contextlib.suppress(OSError):
            self.madvise(mmap.MADV_DONTFORK)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if not self._pinned and int(torch.cuda.cudart().cudaHostRegister(begin, len(self), 0)) == 0:
            self._pinned = begin

    def __del__(self) -> None:
        # Before the memory itself goes.
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)


def uses_devices() -> bool:
    """Whether this process has anything on a device."""
    return bool(torch.cuda.is_initialized())


def own_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of this worker: that of its ``tensors``, if any are on one; None if it trains on the CPU."""
    found = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return found or (torch.device("cuda", torch.cuda.current_device()) if uses_devices() else None)


def take_at_once(device: torch.device, size: int) -> None:
    """Have torch take so many bytes of the device's memory in one piece, of which it gives out parts from now on.

    Many small ones would each wait for what the device is just doing.
    """
    # Where there is no piece that large, it takes many after all.
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8, device=device)
