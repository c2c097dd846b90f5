"""Lets the agent ask this process for the stacks of its threads, by a signal.

``register`` is called once at the start of a worker's process; ``agent/stacks.py`` sends the signal. The handler is C
and needs no GIL: it answers in a deadlock, in an endless loop, and while a C extension keeps the GIL.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

from craft.wire.activity import STACKS_SIGNAL


def register(path: Path | None) -> None:
    """Write the stacks of all threads to the end of ``path`` whenever the signal comes; None: do nothing.

    What this process forks answers as well, into the same file: data-loader processes, for example.
    """
    if path is None:
        return
    # Kept open for the life of the process: the handler can open nothing.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)
