"""A store in a directory of this machine, or of a file system that is mounted here.

What is listed is whole: every file is written elsewhere, made durable, and then renamed to its place. Writers hold a lock on
``lock`` together, garbage collection alone; the kernel frees it when its holder dies. ``store.py`` says who calls what.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from craft.protocol.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.snapshots.manifest import CHUNKS, Ref, chunk_path
from craft.snapshots.store import Adding, Collecting, Found, Store, StoreBusy, Writing

_LOCK = "lock"
_UNFINISHED = "unfinished"
_LOCK_LIMIT_S = 60.0
_LOOK_S = 0.02
_MAX_OPEN = 64
"""Files that wait for the disk at a time."""
_numbers = itertools.count()


class LocalStore(Store):
    """A store under ``root``, which is made when something is written."""

    parallel = 2

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)

    def adding(self) -> Adding:
        return _LocalAdding(self)

    def read(self, ref: Ref, out: memoryview) -> None:
        path = self.root / chunk_path(ref.hash)
        with _explained(path), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != ref.size:
                raise SnapshotCorrupt(f"{path} has {size} bytes where the chunk has {ref.size}", str(path))
            filled = 0
            while filled < size:
                count = file.readinto(out[filled:])
                if not count:
                    raise SnapshotCorrupt(f"{path} ended after {filled} of {size} bytes", str(path))
                filled += count

    def get(self, path: str) -> bytes:
        with _explained(self.root / path):
            return (self.root / path).read_bytes()

    def put(self, path: str, data: bytes) -> None:
        target = self.root / path
        with _explained(target):
            self.make_folder(target.parent)
            written = self.write_unfinished(memoryview(data))
            try:
                os.fsync(written.file)
                os.rename(written.path, target)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(written.path)
                raise
            finally:
                os.close(written.file)
            sync_folder(target.parent)

    def list(self, folder: str) -> list[Found]:
        with _explained(self.root / folder):
            return sorted(self._walk(folder))

    def _walk(self, folder: str) -> Iterator[Found]:
        try:
            entries = list(os.scandir(self.root / folder))
        except FileNotFoundError:
            return
        for entry in entries:
            path = f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(path)
                continue
            # What is gone since the folder was read is not there.
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat()
                yield Found(path, found.st_size, found.st_mtime)

    def remove(self, paths: Iterable[str]) -> int:
        removed = 0
        folders = set()
        for path in paths:
            target = self.root / path
            with _explained(target), contextlib.suppress(FileNotFoundError):
                target.unlink()
                removed += 1
                folders.add(target.parent)
        for folder in folders:
            with _explained(folder), contextlib.suppress(FileNotFoundError):
                sync_folder(folder)
        return removed

    @contextlib.contextmanager
    def writing(self, who: str) -> Iterator[Writing]:
        with _explained(self.root):
            self.make_folder(self.root)
        give_up = time.monotonic() + _LOCK_LIMIT_S
        with self._lock_file() as file:
            while not _locked(file, fcntl.LOCK_SH):
                if time.monotonic() > give_up:
                    raise StoreBusy(f"{self.url}: a garbage collection runs for longer than {_LOCK_LIMIT_S:.0f} s")
                time.sleep(_LOOK_S)
            yield _Held()

    @contextlib.contextmanager
    def collecting(self, who: str) -> Iterator[Collecting]:
        with self._lock_file() as file:
            if not _locked(file, fcntl.LOCK_EX):
                raise StoreBusy(f"{self.url}: somebody writes a checkpoint or collects garbage; try again later")
            yield _Alone(self.root)

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        path = self.root / _LOCK
        with _explained(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield file
        finally:
            os.close(file)

    # For chunks on their way in.

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, durably."""
        if folder.is_dir():
            return
        self.make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        sync_folder(folder.parent)

    def write_unfinished(self, data: memoryview) -> _Unfinished:
        """Write a file that nobody looks for yet, and do not wait for the disk."""
        folder = self.root / _UNFINISHED
        self.make_folder(folder)
        path = folder / f"{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            done = 0
            while done < len(data):
                done += os.write(file, data[done:])
            # Lets the disk begin now, where an fsync later would find everything still to do.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            os.close(file)
            os.unlink(path)
            raise
        return _Unfinished(file, path)


class _Unfinished(NamedTuple):
    file: int
    path: Path


class _LocalAdding(Adding):
    def __init__(self, store: LocalStore) -> None:
        self._store = store
        # Guards what follows: several threads add.
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._folders: set[Path] = set()
        self._pending: list[tuple[_Unfinished, Path]] = []

    def add(self, ref: Ref, data: memoryview) -> bool:
        path = self._store.root / chunk_path(ref.hash)
        with self._lock:
            if ref.hash in self._begun:
                return False
            self._begun.add(ref.hash)
            # Also of what is there: whoever renamed it may have died before that was durable.
            self._folders.add(path.parent)
        with _explained(path):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size == ref.size:
                    return False
            self._store.make_folder(path.parent)
            written = self._store.write_unfinished(data)
        with self._lock:
            self._pending.append((written, path))
            full, self._pending = (self._pending, []) if len(self._pending) >= _MAX_OPEN else ([], self._pending)
        self._settle(full)
        return True

    def finish(self) -> None:
        with self._lock:
            rest, self._pending = self._pending, []
        self._settle(rest)
        for folder in sorted(self._folders):
            with _explained(folder):
                sync_folder(folder)
        if self._folders:
            with _explained(self._store.root / CHUNKS):
                sync_folder(self._store.root / CHUNKS)

    def _settle(self, pending: list[tuple[_Unfinished, Path]]) -> None:
        """Make files durable, all of them first, and then move them to their places."""
        try:
            for written, path in pending:
                with _explained(path):
                    os.fsync(written.file)
            for written, path in pending:
                with _explained(path):
                    os.rename(written.path, path)
        finally:
            _drop(pending)

    def discard(self) -> None:
        with self._lock:
            rest, self._pending = self._pending, []
        _drop(rest)


def _drop(pending: list[tuple[_Unfinished, Path]]) -> None:
    for written, _ in pending:
        os.close(written.file)
        # Those that were renamed are not there any more.
        with contextlib.suppress(OSError):
            os.unlink(written.path)


class _Held(Writing):
    def check(self) -> None:
        """The kernel keeps a lock for as long as its holder lives."""


class _Alone(Collecting):
    def __init__(self, root: Path) -> None:
        self._root = root

    def check(self) -> None:
        """The kernel keeps a lock for as long as its holder lives."""

    def tidy(self) -> None:
        with _explained(self._root):
            for path in _children(self._root / _UNFINISHED):
                path.unlink()
            for folder in _children(self._root / "parts"):
                # One that is not empty stays.
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise SnapshotError(
            f"this file system has no locks ({error.strerror}), without which garbage could not be told from what is being"
            " written: keep checkpoints on another one"
        ) from None
    return True


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the system, as ours."""
    try:
        yield
    except FileNotFoundError:
        raise SnapshotMissing(f"there is no {path}", str(path)) from None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}", str(path)) from error
