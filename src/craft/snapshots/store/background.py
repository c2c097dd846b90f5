"""Keep background work out of the way of training steps, and decide on retries."""

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
"""Not more: a thread that holds the GIL and is descheduled delays the training thread."""
REST = 6.0
"""Hashing and writing a state from devices rests this many times as long as it works: a step there needs the host's cores
and memory only for its exchange, and a burst of competition would show in one step."""
_FIRST_S = 0.5
_LONGEST_S = 30.0
_MAX_TRIES = 8
"""A store that was away for a minute is retried; then the next checkpoint is worth more than this one."""
_MAX_AWAITED = 2
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
"""Errors that last until a person repairs the store."""
_CORES_PER_HASH = 8
_CORES_PER_LANE = 8
_MOST_AT_ONCE = 4
_MAX_LANES = 8


def num_hashing() -> int:
    """Return the number of threads that hash for a donor. A core does some 4 GB/s; most cores are for training."""
    return max(1, min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) // _CORES_PER_HASH))


def num_lanes(num_donors: int) -> int:
    """Return the number of connections to each donor: one carries less than a machine with many cores can."""
    by_cores = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) // _CORES_PER_LANE)
    return max(1, min(by_cores, _MAX_LANES // max(1, num_donors)))


def lower_priority() -> None:
    """Let this thread run only when others are idle."""
    # A kernel that does not allow it runs the thread at normal priority.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def retry_after(tries: int, error: Exception, awaited: bool = False) -> float | None:
    """Return the seconds until the next attempt after ``error``; None: give up.

    ``awaited``: the job is done and waits for this alone, so that a store that must not be written to is not retried.
    """
    if awaited and tries >= _MAX_AWAITED and _is_forbidden(error):
        return None
    # Retrying does not make differing states agree, nor a store belong to this job.
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
    """Return what ``call`` returns, with as many attempts as it takes; None: given up.

    ``failed`` receives each error, the number of attempts, and the seconds until the next one (None: no more). ``ended``
    waits that long and returns whether to stop. ``awaited``: whether the job is done and waits for it.
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
