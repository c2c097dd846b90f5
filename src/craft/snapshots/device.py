"""Copies from device memory to the host's, beside what the device computes.

Enters: pieces of tensors at a step boundary. Leaves: the same bytes on the host, a while later. ``portable.py`` makes copies,
``donor.py`` and ``writer.py`` wait for them on their own threads. The worker calls ``hold_back`` before the script's update
code runs: what it is about to change may still be on its way. Nothing here is done for tensors on the CPU.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream beside all others on which state is copied, from a device or to it."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def hold_back() -> None:
    """Let the current stream wait until everything that is being copied has been."""
    for device, stream in _streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)


class Copies:
    """Copies of one state. The main thread makes them; whoever has what ``begin`` returned may wait for them."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[torch.device, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, source: torch.Tensor, out: torch.Tensor, *, steady: bool) -> None:
        """Copy with ``begin``; ``steady``: only the script's update code changes ``source``, so there is time until then."""
        self._wanted.setdefault((source.device, steady), []).append((source, out))

    def begin(self) -> Callable[[], None]:
        """Begin all copies; what is returned returns when they are on the host."""
        wanted, self._wanted = self._wanted, {}
        if not wanted:
            return _at_once
        events = [_copy_on(_stream(device, steady), pairs) for (device, steady), pairs in wanted.items()]
        # Until they are copied nobody else may get the memory of the sources.
        return _Wait(events, [source for pairs in wanted.values() for source, _ in pairs])


def _stream(device: torch.device, steady: bool) -> torch.cuda.Stream:
    current = torch.cuda.current_stream(device)
    if not steady:
        return current
    beside = stream_of(device)
    beside.wait_stream(current)
    return beside


def _copy_on(stream: torch.cuda.Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        for source, out in pairs:
            out.copy_(source, non_blocking=True)
    return _mark(stream)


class _Wait:
    def __init__(self, events: Sequence[torch.cuda.Event], sources: list[torch.Tensor]) -> None:
        self._events = events
        self._sources = sources

    def __call__(self) -> None:
        for event in self._events:
            event.synchronize()
        self._sources.clear()


def _at_once() -> None:
    """There was nothing to wait for."""


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: who waits sleeps, instead of keeping a core busy that the training needs.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class Room(mmap.mmap):
    """Memory that can be pinned, so that a device reads and writes it by itself, at several times the speed."""

    _pinned: int = 0

    @property
    def is_pinned(self) -> bool:
        return self._pinned != 0

    def pin(self) -> None:
        """Pin it, all at once: a copy must not cross two pieces. Where the system does not allow it, it stays as it is.

        Takes about as long as to touch it, and is for a thread that has the time.
        """
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
