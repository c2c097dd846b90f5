"""Write files that are complete and durable before they become visible; map system errors to CRAFT's. For ``local.py``."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from craft.protocol.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing

_numbers = itertools.count()


class Unfinished(NamedTuple):
    """A file that is not visible yet."""

    file: int
    path: Path

    def drop(self) -> None:
        os.close(self.file)
        # Gone if it was moved to its place.
        with contextlib.suppress(OSError):
            self.path.unlink()


def write_unfinished(folder: Path, data: memoryview) -> Unfinished:
    """Write a file into ``folder`` under a unique name, without waiting for the disk."""
    path = new_path(folder)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    unfinished = Unfinished(file, path)
    try:
        write_all(file, data)
        # Starts writing now, so that a later fsync has less to do.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        unfinished.drop()
        raise
    return unfinished


def new_path(folder: Path) -> Path:
    """Return a unique path; make ``folder``."""
    make_folder(folder)
    return folder / f"{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    sync(folder.parent)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(file, data[done:])


def open_regular(path: Path) -> int:
    """Open a file for reading; raise SnapshotCorrupt unless it is regular: reading a pipe would block for ever."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise SnapshotCorrupt(f"{path} is not a regular file: remove it", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """Return the content of a file."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Map system errors to CRAFT's."""
    try:
        yield
    except FileNotFoundError:
        raise SnapshotMissing(f"there is no {path}", str(path)) from None
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror or error}", str(path)) from error
