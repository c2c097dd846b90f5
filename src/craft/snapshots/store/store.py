"""The role of a store: it holds chunks, named by the hash of their bytes, and small files beside them.

Calls, in order. A writer: ``writing`` around everything, ``adding`` for its chunks, ``put`` for its part and the manifest.
A reader: ``files``, ``get``, ``read``. Garbage collection: ``collecting`` around ``files`` and ``remove``. Any thread may make
them. They raise only SnapshotError (SnapshotMissing for a missing file), which names the file. ``local.py`` and ``remote.py``
implement it; ``tiers.open_store`` picks one.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import msgspec

from craft.protocol.errors import SnapshotError, SnapshotMissing
from craft.settings.files.sealed import Damaged, is_sealed, seal
from craft.snapshots.store.manifest import Ref

T = TypeVar("T")


class StoreBusy(SnapshotError):
    """Another process writes while this one wants to remove, or removes while this one wants to write."""


class Found(NamedTuple):
    """A file of a store."""

    path: str
    size: int
    modified: float
    """In seconds since 1970, by the clock of the store."""


class Adding(abc.ABC):
    """Chunks on their way into a store. None is certain to be there before ``finish`` has returned.

    As a context manager it finishes at the end of the block, or discards after an error.
    """

    def __init__(self) -> None:
        # Guards what implementations share between threads: several add.
        self._lock = threading.Lock()
        self._begun: set[str] = set()

    def _begins(self, ref: Ref) -> bool:
        """Return whether this is the first call for a chunk."""
        with self._lock:
            is_first = ref.hash not in self._begun
            self._begun.add(ref.hash)
        return is_first

    def __enter__(self) -> Adding:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()

    @abc.abstractmethod
    def add(self, ref: Ref, read: Callable[[], memoryview]) -> bool:
        """Write a chunk, unless it exists with the right size; return whether it had to be read and written."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait until everything that was added is durable, including chunks that others had written before."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Drop what has not been finished. Harmless afterwards."""


class Store(abc.ABC):
    """A place for checkpoints."""

    url: str
    parallel: int
    """Number of threads that write to it fastest."""

    def where(self, path: str) -> str:
        """Return the path of a file of this store for people."""
        return f"{self.url.rstrip('/')}/{path}"

    @abc.abstractmethod
    def adding(self) -> Adding: ...

    @abc.abstractmethod
    def read(self, ref: Ref, out: memoryview) -> None:
        """Fill ``out``, which has the size of the chunk; the caller checks its hash."""

    @abc.abstractmethod
    def get(self, path: str) -> bytes: ...

    @abc.abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write or replace a small file, atomically and durably."""

    def put_sealed(self, path: str, value: msgspec.Struct) -> None:
        """Write a small value as JSON with a checksum."""
        self.put(path, seal(msgspec.json.encode(value)))

    def get_sealed(self, path: str, kind: type[T]) -> T | None:
        """Return such a value; None if it is missing. Raises Damaged."""
        try:
            data = self.get(path)
            is_sealed(data)
            return msgspec.json.decode(data, type=kind)
        except SnapshotMissing:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged(str(error)) from None

    @abc.abstractmethod
    def files(self, folder: str) -> list[Found]:
        """Return all files below ``folder``, sorted by path, without those that are being written."""

    @abc.abstractmethod
    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, as far as they exist."""

    @abc.abstractmethod
    def remove_one(self, path: str) -> bool:
        """Remove a file; return whether it existed. Of two concurrent calls only one returns True, if there are locks."""

    def pinned(self) -> list[bytes]:
        """Return files that name chunks needed for a while, besides manifests and parts."""
        return []

    @abc.abstractmethod
    def writing(self, who: str) -> AbstractContextManager[Guard]:
        """Keep chunks from being removed while this lasts. Raises StoreBusy if a collection takes too long."""

    @abc.abstractmethod
    def collecting(self, who: str) -> AbstractContextManager[Guard]:
        """Keep writers from starting while this lasts. Raises StoreBusy at once if there is a writer."""


class Guard(abc.ABC):
    """The right to rely on existing chunks, or to remove chunks."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise StoreBusy if it may have been lost meanwhile: chunks may be gone, and none may be removed."""

    @abc.abstractmethod
    def tidy(self) -> None:
        """Remove unfinished writes. Only while ``collecting``."""
