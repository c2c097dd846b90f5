"""A store at any URL that fsspec knows, such as an object store.

There a file is complete as soon as it exists, but there are no locks: ``lease_files.py`` replaces them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from craft.protocol.errors import ConfigError, SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.snapshots.store.lease_files import INTENTS, LEASES, LeaseFile
from craft.snapshots.store.manifest import Ref, chunk_path
from craft.snapshots.store.store import Adding, Found, Guard, Store, StoreBusy

_LOOK_S = 0.5
_PATIENCE_S = 60.0
_TRIES = 10
_RETRY_S = 0.05
_LONGEST_S = 2.0


class RemoteStore(Store):
    """A store below ``url``."""

    parallel = 8

    def __init__(self, url: str) -> None:
        # Imported late: most jobs use a directory, and this takes a while to load.
        import fsspec
        from fsspec.asyn import AsyncFileSystem

        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        try:
            # Files of other processes must be visible at once.
            self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url}: {error}: install the package that reads {scheme}://, or give another place for checkpoints"
            ) from None
        self._root = self._files._strip_protocol(self.url)
        self._has_no_folders = isinstance(self._files, AsyncFileSystem)
        """As on object stores; making a folder there could make a bucket."""

    def call(self, path: str, name: str, *args: Any, **settings: Any) -> Any:
        """Make a call on a file, with retries; map every error to one of CRAFT's."""
        tries = 0
        while True:
            try:
                return getattr(self._files, name)(f"{self._root}/{path}", *args, **settings)
            except FileNotFoundError:
                raise SnapshotMissing(f"there is no {self.where(path)}", self.where(path)) from None
            except Exception as error:
                # Each kind of store has its own errors. One failed request must not cost a whole share.
                tries += 1
                if tries == _TRIES:
                    text = str(error) or repr(error)
                    raise SnapshotError(f"{self.where(path)}: {text}", self.where(path)) from error
                time.sleep(min(_LONGEST_S, _RETRY_S * 2**tries))

    def adding(self) -> Adding:
        return _RemoteAdding(self)

    def read(self, ref: Ref, out: memoryview) -> None:
        data = self.get(chunk_path(ref.hash))
        if len(data) != ref.size:
            file = self.where(chunk_path(ref.hash))
            raise SnapshotCorrupt(f"{file} has {len(data)} bytes where the chunk has {ref.size}", file)
        out[:] = data

    def get(self, path: str) -> bytes:
        return bytes(self.call(path, "cat_file"))

    def put(self, path: str, data: bytes) -> None:
        try:
            self.call(path, "pipe_file", data)
        except SnapshotMissing:
            if self._has_no_folders:
                raise SnapshotMissing(
                    f"there is no {self.url}: make the bucket, or correct the URL", self.url
                ) from None
            self.call(path.rpartition("/")[0], "makedirs", exist_ok=True)
            self.call(path, "pipe_file", data)

    def size(self, path: str) -> int | None:
        try:
            return int(self.call(path, "info")["size"])
        except SnapshotMissing:
            return None

    def files(self, folder: str) -> list[Found]:
        try:
            found = self.call(folder, "find", detail=True)
        except SnapshotMissing:
            return []
        files = []
        for path, detail in found.items():
            name = path[len(self._root) :].lstrip("/")
            files.append(Found(name, int(detail["size"] or 0), _modified(detail)))
        return sorted(files)

    def remove(self, paths: Iterable[str]) -> None:
        def remove(path: str) -> None:
            with contextlib.suppress(SnapshotMissing):
                self.call(path, "rm_file")

        with ThreadPoolExecutor(self.parallel, "craft-remove") as pool:
            for _ in pool.map(remove, paths):
                pass

    def remove_one(self, path: str) -> bool:
        was_there = self.size(path) is not None
        self.remove([path])
        return was_there

    def modified(self, path: str) -> float | None:
        """Return when a file was last written, by the store's clock; None if it is missing."""
        try:
            return _modified(self.call(path, "info"))
        except SnapshotMissing:
            return None

    @contextlib.contextmanager
    def writing(self, who: str) -> Iterator[Guard]:
        intent = LeaseFile(self, self.modified, INTENTS, who)
        try:
            intent.begin()
            give_up = time.monotonic() + _PATIENCE_S
            while intent.others(LEASES):
                if time.monotonic() > give_up:
                    raise StoreBusy(f"{self.url}: a garbage collection runs for longer than {_PATIENCE_S:.0f} s")
                time.sleep(_LOOK_S)
                # Its time is compared with those of others.
                intent.speak()
            yield intent
        finally:
            intent.end()

    @contextlib.contextmanager
    def collecting(self, who: str) -> Iterator[Guard]:
        lease = LeaseFile(self, self.modified, LEASES, who)
        try:
            lease.begin()
            if lease.others(LEASES) or lease.others(INTENTS):
                raise StoreBusy(f"{self.url}: another process writes a checkpoint or collects garbage; try again later")
            yield lease
        finally:
            lease.end()


class _RemoteAdding(Adding):
    def __init__(self, store: RemoteStore) -> None:
        super().__init__()
        self._store = store

    def add(self, ref: Ref, read: Callable[[], memoryview]) -> bool:
        path = chunk_path(ref.hash)
        if not self._begins(ref) or self._store.size(path) == ref.size:
            return False
        self._store.put(path, bytes(read()))
        return True

    def finish(self) -> None:
        """Return: each chunk was durable when its call returned."""

    def discard(self) -> None:
        """Return: nothing is half done."""


def _modified(detail: dict[str, Any]) -> float:
    for key in ("LastModified", "mtime", "created", "modified"):
        value = detail.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
