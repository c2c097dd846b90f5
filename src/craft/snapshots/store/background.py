"""How work behind the back of a training step keeps out of its way, and how long it waits after a failure."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from craft.protocol.errors import BitsDiffer
from craft.snapshots.store.owner import StoreTaken

T = TypeVar("T")

_NICE = 5
"""Not more: whoever holds Python's lock and does not run holds the training thread up."""
REST = 6.0
"""What hashes and writes a state that came from devices rests for so many times as long as it works: a step there takes the
host's cores and memory for its exchange alone, and what competes for them all at once shows in one step."""
_FIRST_S = 0.5
_LONGEST_S = 30.0
_MAX_TRIES = 8
"""A store that was away for a minute is waited for; then the next checkpoint is worth more than this one."""
_MAX_AWAITED = 2
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""Errors that last until a person repairs the place."""
_CORES_PER_HASH = 8
_CORES_PER_LANE = 8
_MOST_AT_ONCE = 4
_MAX_LANES = 8


def num_hashing() -> int:
    """Threads that hash what a donor serves. A core does some 4 GB/s; most of them are for training."""
    return max(1, min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) // _CORES_PER_HASH))


def num_lanes(num_donors: int) -> int:
    """Connections to each of so many donors: one carries less than what a machine of many cores can."""
    by_cores = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) // _CORES_PER_LANE)
    return max(1, min(by_cores, _MAX_LANES // max(1, num_donors)))


def lower_priority() -> None:
    """Let this thread run when the others of the machine do not want to."""
    # A kernel that does not allow it runs the thread all the same.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def retry_after(tries: int, error: Exception, awaited: bool = False) -> float | None:
    """Seconds until the next try, after so many that failed, the last one by ``error``; None: there is none.

    ``awaited``: the job is done and waits for this alone. What must not be written to is then not waited for.
    """
    if awaited and tries >= _MAX_AWAITED and _is_forbidden(error):
        return None
    # Members whose states differ will not agree by trying again, nor will a place become this job's.
    if tries >= _MAX_TRIES or isinstance(error, BitsDiffer | StoreTaken):
        return None
    return min(_LONGEST_S, _FIRST_S * 2.0 ** (tries - 1))


def _is_forbidden(error: Exception) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FORBIDDEN


def insist(
    call: Callable[[], T],
    failed: Callable[[Exception, int, float | None], None],
    ended: Callable[[float], bool],
    awaited: Callable[[], bool] = lambda: False,
) -> T | None:
    """Return what ``call`` returns, after as many tries as it takes; None: that was given up.

    ``failed`` is told of each failure, how many there were, and the seconds until the next try, None if there is none. ``ended``
    waits so many seconds, and says whether nobody wants it any more. ``awaited``: whether the job is done and waits for it.
    """
    tries = 0
    while True:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  (the edge of a thread: it becomes an event)
            tries += 1
            retry_s = retry_after(tries, error, awaited())
            failed(error, tries, retry_s)
            if retry_s is None or ended(retry_s):
                return None
