"""Another user of the machine, for tests of what one user may do to another; only root can be one."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STRANGER = 54321
"""The number of a user that nothing belongs to."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def reachable_folder(mode: int = 0o755) -> Iterator[Path]:
    """Make a folder that other users reach, and remove it afterwards.

    It is not below pytest's own folders. Those are closed to other users, and all tests that run at the same time share
    them: a test that opens them for a while races with a test that closes them.
    """
    with tempfile.TemporaryDirectory(prefix="craft-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(mode)
        yield folder


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Call ``act`` in a process of another user; fails if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        except BaseException:  # noqa: BLE001  (the edge of a process)
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "see the traceback of the other user's process"
