"""Open files that must belong to this user alone: those of the run directory, and tokens. The only place that does so.

Machines are shared. Another user may have made the folder, or planted a link, a pipe or a file in it. So nothing here follows
a link to a file, a folder is checked before a file in it is opened, and an open file is checked before it is used. Problems
raise OSError with a sentence as ``strerror``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_private(path: Path, flags: int, *, shared: bool = False) -> int:
    """Open a file of this user without following links; ``flags`` may create it, with mode 0600.

    ``shared``: others may write to its folder, as to /tmp.
    """
    with contextlib.ExitStack() as stack:
        folder = None if shared else stack.enter_context(own_folder(path.parent))
        return _open_own(path, flags, folder)


def append_private(path: Path) -> int:
    """Open a file of this user for appending; create it if it does not exist."""
    return open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def read_private(path: Path) -> bytes:
    """Return the content of a file of this user in a folder that no other user can write to."""
    with open(open_private(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_named(path: Path) -> bytes:
    """Return the content of a secret file that the user named; it must belong to this user or root, and be closed to changes.

    Links are followed: Kubernetes mounts secrets as links.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()):
            raise _refusal(path, f"it belongs to {_user(found.st_uid)}, who knows it, too: make a copy of your own")
        if found.st_mode & _OTHERS_WRITE and stat.S_ISREG(found.st_mode):
            mode = stat.S_IMODE(found.st_mode)
            raise _refusal(path, f"its mode {mode:04o} lets other users change it: chmod 600, if it is yours")
        return file.read()


def write_private(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Replace a file atomically and durably, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # A process with the same id may have been killed right here: containers reuse them.
    temporary.unlink(missing_ok=True)
    try:
        _write(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, shared=shared), data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path)


def write_over(path: Path, data: bytes) -> None:
    """Overwrite a private file in place and durably, from its start; create it if it does not exist."""
    _write(open_private(path, os.O_WRONLY | os.O_CREAT), data)


def sync_folder(path: Path) -> None:
    """Make a rename to ``path`` durable: after a power cut the old file could return when the new one was already used."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def make_folder(path: Path) -> int:
    """Make a folder that only this user can enter, or take over an existing one; return the mode that it had.

    Raise OSError for one that another user owns or can write to: its content may be planted.
    """
    made = False
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        made = True
    with own_folder(path, writable=made) as folder:
        before = stat.S_IMODE(os.fstat(folder).st_mode)
        if before & _OTHERS:
            os.fchmod(folder, 0o700)
        after = stat.S_IMODE(os.fstat(folder).st_mode)
        if after & _OTHERS:
            raise _refusal(path, f"its mode stays {after:04o} on this file system, so that others can enter it")
    return 0o700 if made else before


@contextlib.contextmanager
def own_folder(path: Path, *, writable: bool = False) -> Iterator[int]:
    """Open a folder that belongs to this user; ``writable``: even if others may write to it."""
    named = os.lstat(path)
    linked = stat.S_ISLNK(named.st_mode)
    if linked and named.st_uid not in (0, os.geteuid()):
        raise _refusal(path, f"it is a link that {_user(named.st_uid)} made")
    # A link is followed only after this check.
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if linked else os.O_NOFOLLOW))
    try:
        found = os.fstat(folder)
        if not _is_own(folder, found.st_uid):
            raise _refusal(path, f"it belongs to {_user(found.st_uid)}, and you are {_user(os.geteuid())}")
        if found.st_mode & _OTHERS_WRITE and not writable:
            raise _refusal(path, f"its mode {stat.S_IMODE(found.st_mode):04o} lets other users write to it")
        yield folder
    finally:
        os.close(folder)


def is_own_folder(path: Path) -> bool:
    """Return whether a folder belongs to this user, and no other user can write to it."""
    try:
        with own_folder(path):
            return True
    except OSError:
        return False


def _open_own(path: Path, flags: int, folder: int | None) -> int:
    # O_NONBLOCK: do not wait for the other end of a planted pipe.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path if folder is None else path.name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _refusal(path, "it is a link, and links are not followed here: remove it") from None
        error.filename = str(path)
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, "it is not a plain file: remove it")
        owners = {os.geteuid()} if folder is None else {os.geteuid(), os.fstat(folder).st_uid}
        if found.st_uid not in owners:
            raise _refusal(path, f"it belongs to {_user(found.st_uid)}, and you are {_user(os.geteuid())}: remove it")
        os.set_blocking(fd, True)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_own(folder: int, uid: int) -> bool:
    """Return whether a folder's owner is this user, under the id that its file system gives to this user.

    Network file systems map ids: root's files may belong to 'nobody' there. A new file shows which id is ours.
    """
    if uid == os.geteuid():
        return True
    name = f".craft-{uuid.uuid4().hex}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_uid == uid
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=folder)


def _write(fd: int, data: bytes) -> None:
    try:
        os.fchmod(fd, 0o600)
        while data:
            # A disk that is nearly full takes a part, and refuses the rest.
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _refusal(path: Path, reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, reason, str(path))


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user {uid})"
    except KeyError:
        return f"user {uid}"
