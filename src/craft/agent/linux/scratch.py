"""The agent's folder in memory, for its socket and the workers' activity pages.

A killed agent cannot remove its folder; the next one on the same machine does. A folder is in use while its file ``lock``
is locked; the kernel releases the lock when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from craft.settings.files.private_files import open_private
from craft.wire.activity import memory_folder

_PREFIX = "craft-"


class Scratch:
    """A new folder, in use until ``close`` or the end of this process."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or memory_folder()
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Locked before the rename: ``sweep`` must never find an unlocked lock file of a live agent.
        unnamed = self.path / "lock.new"
        self._lock = open_private(unnamed, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / "lock")

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove the folders of this user's agents that have ended."""
    for lock in parent.glob(f"{_PREFIX}*/lock"):
        try:
            fd = open_private(lock, os.O_RDWR)
        except OSError:
            # It belongs to another user, or was removed meanwhile.
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
