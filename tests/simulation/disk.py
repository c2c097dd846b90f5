"""The disk of a run directory: a folder in memory on which syncs fail, room ends, power is cut and bits flip.

Production code opens, links and renames real files of it. ``os.write`` and ``os.fsync`` come through here. So it is known
what would survive a power cut: the content that a file had when it was last synced, under the names that its folder had
when that was.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
from collections.abc import Callable
from pathlib import Path

from .clock import CURRENT

_write, _fsync = os.write, os.fsync


DISK_ERRORS = (errno.ENOSPC, errno.EIO)


class Killed(BaseException):
    """The process that is just writing was killed: nothing of it runs any more."""


class Disk:
    """One folder; what is in folders below it is not looked at."""

    def __init__(self, folder: Path, chance: random.Random, on_kill: Callable[[], None]) -> None:
        self.folder = folder
        self._on_kill = on_kill
        self._chance = chance
        self._number = folder.stat().st_ino
        self._synced: dict[int, bytes] = {}
        """The content of files when they were last synced, by their inode."""
        self._names: dict[str, int] = {}
        """The folder as it was last synced."""
        self.damaged: set[str] = set()
        """Files of which bits were flipped, or which a power cut tore."""
        self.is_full = False
        self.syncs_fail = False
        self.kill_after: int | None = None
        """After so many writes and syncs the process that writes is killed: half of the write is there."""

    def write(self, fd: int, data: bytes) -> int:
        """``os.write``, for files of the folder."""
        if not self._is_here(fd):
            return _write(fd, data)
        self._count(lambda: _write(fd, data[: self._chance.randrange(len(data) + 1)]))
        if self.is_full:
            room = max(0, os.fstat(fd).st_size - _position(fd))
            if room < len(data):
                if room and not _appends(fd):
                    return _write(fd, data[:room])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return _write(fd, data)

    def fsync(self, fd: int) -> None:
        """``os.fsync``, for files of the folder and for itself."""
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            if found.st_ino == self._number:
                self._count(lambda: None)
                self._may_fail()
                self._names = {each.name: each.inode() for each in os.scandir(self.folder) if each.is_file()}
        elif self._is_here(fd):
            self._count(lambda: None)
            self._may_fail()
            self._synced[found.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def cut_power(self) -> None:
        """Leave what was synced, and of the rest what by chance was written, too."""
        now = {each.name: each.inode() for each in os.scandir(self.folder) if each.is_file()}
        contents = {number: (self.folder / name).read_bytes() for name, number in now.items()}
        names = now if self._chance.random() < 0.5 else self._names
        after = {name: self._survives(number, contents.get(number)) for name, number in names.items()}
        for name in now:
            (self.folder / name).unlink()
        self._synced.clear()
        self._names.clear()
        for name, content in after.items():
            path = self.folder / name
            path.write_bytes(content)
            path.chmod(0o600)
            self._synced[path.stat().st_ino] = content
            self._names[name] = path.stat().st_ino

    def _survives(self, number: int, current: bytes | None) -> bytes:
        synced = self._synced.get(number, b"")
        if current is None or current == synced or self._chance.random() < 0.5:
            return synced
        # Appended to, or written over: what was there before the sync that did not come is in part replaced.
        kept = self._chance.randrange(len(current) + 1)
        return current[:kept] + synced[kept:]

    def flip(self, name: str) -> bool:
        """Turn one bit of a file over; False if it is not there or empty."""
        path = self.folder / name
        if not path.exists() or not path.stat().st_size:
            return False
        data = bytearray(path.read_bytes())
        self.damaged.add(name)
        used = len(data.rstrip()) or len(data)
        data[self._chance.randrange(used)] ^= 1 << self._chance.randrange(8)
        with path.open("r+b") as file:
            file.write(data)
        return True

    def _is_here(self, fd: int) -> bool:
        return os.path.dirname(os.readlink(f"/proc/self/fd/{fd}")) == str(self.folder)

    def _may_fail(self) -> None:
        if self.syncs_fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _count(self, half: Callable[[], object]) -> None:
        process = CURRENT.get()
        if self.kill_after is None or process is None or process.name != "lighthouse":
            return
        self.kill_after -= 1
        if self.kill_after >= 0:
            return
        self.kill_after = None
        half()
        self._on_kill()
        process.kill(signal.SIGKILL)
        raise Killed


def _position(fd: int) -> int:
    return os.fstat(fd).st_size if _appends(fd) else os.lseek(fd, 0, os.SEEK_CUR)


def _appends(fd: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_APPEND)
