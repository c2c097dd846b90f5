"""The role of a store: a place for chunks, named by the hash of their bytes, and for the small files beside them.

Calls, in their order. A writer: ``writing`` around everything, ``adding`` for its chunks, ``put`` for its part and the manifest.
A reader: ``files``, ``get``, ``read``. Garbage collection: ``collecting`` around ``files`` and ``remove``. All may be called from
several threads. They raise SnapshotError (SnapshotMissing where a file is not there), which names the file, and nothing else.
``local.py`` and ``remote.py`` are the two kinds; ``open_store`` picks one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from craft.protocol.errors import SnapshotError
from craft.snapshots.store.manifest import Ref


class StoreBusy(SnapshotError):
    """Somebody else is at it: writes while this one wants to remove, or removes while this one wants to write."""


class Found(NamedTuple):
    """A file of a store."""

    path: str
    size: int
    modified: float
    """In seconds since 1970, by the clock of the store."""


class Adding(abc.ABC):
    """Chunks on their way into a store. Nothing is certain to be there before ``finish`` has returned."""

    @abc.abstractmethod
    def add(self, ref: Ref, read: Callable[[], memoryview]) -> bool:
        """Write a chunk, unless it is there with the right size; return whether it had to be read and written."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait until everything that was added is durable, also what others had written before."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Give up what has not been finished. Harmless afterwards."""


class Store(abc.ABC):
    """A place for checkpoints."""

    url: str
    parallel: int
    """How many threads at a time write to it fastest."""

    def where(self, path: str) -> str:
        """A file of this store, as a person would name it."""
        return f"{self.url.rstrip('/')}/{path}"

    @abc.abstractmethod
    def adding(self) -> Adding: ...

    @abc.abstractmethod
    def read(self, ref: Ref, out: memoryview) -> None:
        """Fill ``out``, which has as many bytes as the chunk; its hash is for the caller to check."""

    @abc.abstractmethod
    def get(self, path: str) -> bytes: ...

    @abc.abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a small file, atomically, in the place of one that is there, and durably."""

    @abc.abstractmethod
    def files(self, folder: str) -> list[Found]:
        """All files below ``folder``, in the order of their paths, without those that are being written."""

    @abc.abstractmethod
    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, those that are there."""

    @abc.abstractmethod
    def remove_one(self, path: str) -> bool:
        """Remove a file; return whether it was there. Of two who do so at once, only one is told so, where locks exist."""

    def pinned(self) -> list[bytes]:
        """Files that say which chunks somebody needs for a while, besides those of manifests and parts."""
        return []

    @abc.abstractmethod
    def writing(self, who: str) -> AbstractContextManager[Writing]:
        """While this lasts, nobody removes a chunk. Raises StoreBusy if somebody does so and goes on for too long."""

    @abc.abstractmethod
    def collecting(self, who: str) -> AbstractContextManager[Collecting]:
        """While this lasts, nobody begins to write. Raises StoreBusy at once if somebody writes."""


class Writing(abc.ABC):
    """The right to rely on chunks that are there."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise StoreBusy if it may have been lost meanwhile: then what was found there may be gone."""


class Collecting(abc.ABC):
    """The right to remove chunks."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise StoreBusy if it may have been lost meanwhile: then nothing more may be removed."""

    @abc.abstractmethod
    def tidy(self) -> None:
        """Remove what somebody began to write and did not finish."""
