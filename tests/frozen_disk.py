"""A disk of its own for a test that can be frozen: whoever writes to it or syncs it waits in the kernel until it thaws."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LONGEST_S = 30
"""A disk thaws after so long, whatever becomes of the test: what waits for it could not even be killed."""
_COMMANDS = ("mkfs.ext4", "mount", "fsfreeze")


@contextmanager
def mounted(place: Path, megabytes: int = 64) -> Iterator[Path]:
    """An ext4 file system at ``place``, which is made; gone afterwards."""
    image = place.with_name(f"{place.name}.image")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    place.mkdir()
    # Reading must not write: a frozen disk could not even be looked at.
    made = ["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop,noatime", str(image), str(place)]
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing or any(subprocess.run(each, capture_output=True, check=False).returncode for each in made):
        pytest.skip(f"only root can mount a disk that can be frozen, with {', '.join(_COMMANDS)} and loop devices")
    try:
        place.chmod(0o700)
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Until the end of the block nothing is written to the disk at ``place``."""
    thaw = shlex.join(["fsfreeze", "--unfreeze", str(place)])
    # In a session of its own: it outlives a test that is killed.
    guard = subprocess.Popen(
        ["sh", "-c", f"sleep {LONGEST_S}; {thaw}"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        subprocess.run(["fsfreeze", "--freeze", str(place)], check=True)
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(place)], check=False)
        guard.kill()
        guard.wait()
