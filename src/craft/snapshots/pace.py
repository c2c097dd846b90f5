"""How work behind the back of a training step keeps out of its way, and how long it waits after a failure."""

from __future__ import annotations

import contextlib
import os
import threading

_NICE = 10
FIRST_S = 0.5
LONGEST_S = 30.0
MAX_TRIES = 8
"""A store that was away for a minute is waited for; then the next checkpoint is worth more than this one."""


def lower_priority() -> None:
    """Let this thread run when the others of the machine do not want to."""
    # A kernel that does not allow it runs the thread all the same.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def retry_after(tries: int) -> float | None:
    """Seconds until the next try, after so many; None: there is none."""
    return None if tries >= MAX_TRIES else min(LONGEST_S, FIRST_S * 2 ** (tries - 1))
