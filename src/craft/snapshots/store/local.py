"""A store in a directory of this machine, or of a mounted file system.

Every listed file is complete: it is written elsewhere, made durable, then renamed. Writers share a lock on ``store.lock``,
garbage collection holds it alone; the kernel frees it when its holder dies. ``store.py`` says who calls what.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from craft.protocol.errors import SnapshotCorrupt, SnapshotError
from craft.snapshots.store.atomic_files import (
    Unfinished,
    children,
    explained,
    make_folder,
    new_path,
    open_regular,
    read_regular,
    sync,
    write_all,
    write_unfinished,
)
from craft.snapshots.store.manifest import CHUNKS, PARTS, Ref, chunk_path
from craft.snapshots.store.store import Adding, Found, Guard, Store, StoreBusy

logger = logging.getLogger(__name__)

_LOCK = "store.lock"
"""Not plain ``lock``: agents remove folders in memory with such a file as left-overs of dead agents."""
_UNFINISHED = "unfinished"
_PINS = "pins"
_LOCK_LIMIT_S = 60.0
_LOOK_S = 0.005
_MAX_LOOKS = 1000
_MAX_OPEN = 64
"""Files that wait for the disk at a time."""


class LocalStore(Store):
    """A store under ``root``, which is made on the first write."""

    parallel = 2

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self.known: set[str] = set()
        """Hashes of chunks that this process has written, or read and verified, in the last ``adding``."""

    def adding(self) -> Adding:
        return _LocalAdding(self)

    def read(self, ref: Ref, out: memoryview) -> None:
        path = self.root / chunk_path(ref.hash)
        with explained(path), open(open_regular(path), "rb", buffering=0) as file:
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
        with explained(self.root / path):
            return read_regular(self.root / path)

    def put(self, path: str, data: bytes) -> None:
        target = self.root / path
        with explained(target):
            for _ in range(_MAX_LOOKS):
                # A collector removes unfinished files and empty folders, also this one's: no lock is held here.
                with contextlib.suppress(FileNotFoundError):
                    self._put(target, memoryview(data))
                    return
            raise SnapshotError(f"{target} is removed faster than it can be written", str(target))

    def _put(self, target: Path, data: memoryview) -> None:
        make_folder(target.parent)
        written = write_unfinished(self.root / _UNFINISHED, data)
        try:
            os.fsync(written.file)
            os.rename(written.path, target)
        finally:
            written.drop()
        sync(target.parent)

    def files(self, folder: str) -> list[Found]:
        with explained(self.root / folder):
            for _ in range(_MAX_LOOKS):
                # A file that vanished since its folder was read may have made way for one that was not seen.
                with contextlib.suppress(FileNotFoundError):
                    return sorted(self._walk(folder))
            raise SnapshotError(f"{self.root / folder} changes faster than it can be read", str(self.root / folder))

    def _walk(self, folder: str) -> Iterator[Found]:
        for entry in _entries(self.root / folder):
            path = f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(path)
            elif entry.is_file():
                found = entry.stat()
                yield Found(path, found.st_size, found.st_mtime)
            else:
                # Gone since, or not a file: a pipe, a device, a dangling link.
                entry.stat(follow_symlinks=False)
                logger.warning("%s is not a regular file and is ignored: remove it", self.root / path)

    def remove(self, paths: Iterable[str]) -> None:
        folders = set()
        for path in paths:
            self.remove_one(path)
            folders.add((self.root / path).parent)
        for folder in folders:
            with explained(folder), contextlib.suppress(FileNotFoundError):
                sync(folder)

    def remove_one(self, path: str) -> bool:
        with explained(self.root / path):
            try:
                (self.root / path).unlink()
            except FileNotFoundError:
                return False
            return True

    def pin(self, data: bytes) -> Pin:
        """Keep the chunks that ``data`` names until the pin is released or this process ends. Only while ``writing``."""
        with explained(self.root / _PINS):
            path = new_path(self.root / _PINS)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(file, fcntl.LOCK_SH)
            write_all(file, memoryview(data))
        return Pin(file, path)

    def pinned(self) -> list[bytes]:
        found = []
        for path in children(self.root / _PINS):
            # One that was released meanwhile needs nothing.
            with explained(path), contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    found.append(read_regular(path))
        return found

    @contextlib.contextmanager
    def writing(self, who: str) -> Iterator[Guard]:
        with explained(self.root):
            make_folder(self.root)
        give_up = time.monotonic() + _LOCK_LIMIT_S
        with self._lock_file() as file:
            while not _locked(file, fcntl.LOCK_SH):
                if time.monotonic() > give_up:
                    raise StoreBusy(f"{self.url}: a garbage collection runs for longer than {_LOCK_LIMIT_S:.0f} s")
                time.sleep(_LOOK_S)
            yield _KernelLock(self.root)

    @contextlib.contextmanager
    def collecting(self, who: str) -> Iterator[Guard]:
        with self._lock_file() as file:
            if not _locked(file, fcntl.LOCK_EX):
                raise StoreBusy(f"{self.url}: another process writes a checkpoint or collects garbage; try again later")
            yield _KernelLock(self.root)

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        with explained(self.root):
            file = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield file
        finally:
            # Closing alone would leave it locked by forked processes, such as data loaders.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


class Pin:
    """Chunks that are needed for a while. A lock shows that the owner lives."""

    def __init__(self, file: int, path: Path) -> None:
        self._file = file
        self._path = path

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


class _LocalAdding(Adding):
    def __init__(self, store: LocalStore) -> None:
        super().__init__()
        self._store = store
        self._folders: set[Path] = set()
        self._pending: list[tuple[Unfinished, Path]] = []

    def add(self, ref: Ref, read: Callable[[], memoryview]) -> bool:
        path = self._store.root / chunk_path(ref.hash)
        if not self._begins(ref):
            return False
        with self._lock:
            # Also for existing files: the process that renamed them may have died before the rename was durable.
            self._folders.add(path.parent)
        with explained(path):
            if self._is_there(ref, path):
                return False
            make_folder(path.parent)
            written = write_unfinished(self._store.root / _UNFINISHED, read())
        with self._lock:
            self._pending.append((written, path))
            full, self._pending = (self._pending, []) if len(self._pending) >= _MAX_OPEN else ([], self._pending)
        self._settle(full)
        return True

    def _is_there(self, ref: Ref, path: Path) -> bool:
        try:
            if not path.is_file() or path.stat().st_size != ref.size:
                return False
        except FileNotFoundError:
            return False
        # Verified once per process, or one damaged chunk would be in every later checkpoint.
        return ref.hash in self._store.known or blake3(read_regular(path)).hexdigest() == ref.hash

    def finish(self) -> None:
        with self._lock:
            rest, self._pending = self._pending, []
        self._settle(rest)
        root = self._store.root
        for folder in [*sorted(self._folders), root / CHUNKS, root] if self._folders else []:
            with explained(folder):
                sync(folder)
        self._store.known = self._begun

    def _settle(self, pending: list[tuple[Unfinished, Path]]) -> None:
        """Make all files durable first, then move them to their places."""
        try:
            for written, path in pending:
                with explained(path):
                    os.fsync(written.file)
            for written, path in pending:
                with explained(path):
                    os.rename(written.path, path)
        finally:
            for written, _ in pending:
                written.drop()

    def discard(self) -> None:
        with self._lock:
            rest, self._pending = self._pending, []
        for written, _ in rest:
            written.drop()


class _KernelLock(Guard):
    def __init__(self, root: Path) -> None:
        self._root = root

    def check(self) -> None:
        """Return: the kernel keeps a lock as long as its holder lives."""

    def tidy(self) -> None:
        with explained(self._root):
            for path in children(self._root / _UNFINISHED):
                # Gone if it was moved to its place meanwhile.
                path.unlink(missing_ok=True)
            for path in children(self._root / _PINS):
                if path.is_file():
                    _remove_unless_locked(path)
            for folder in children(self._root / PARTS):
                # One that is not empty stays.
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), open(open_regular(path), "rb") as file:
        if _locked(file.fileno(), fcntl.LOCK_EX):
            path.unlink()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, as of one instant if possible."""
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(FileNotFoundError):
        for _ in range(_MAX_LOOKS):
            before = folder.stat().st_mtime_ns
            with os.scandir(folder) as found:
                entries = list(found)
            # While it is read, an entry may appear behind the reader, or vanish ahead of it.
            if folder.stat().st_mtime_ns == before:
                break
    return entries


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise SnapshotError(
            f"this file system has no locks ({error.strerror}), and without them garbage looks like files that are being"
            " written: keep checkpoints on another one"
        ) from None
    return True
