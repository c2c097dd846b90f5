"""The stacks of this process's threads, for the agent.

A thread of this process answers with ``of_all_threads``. If none can, the agent sends a signal; ``register`` installs its
handler once, at the start of the process. The handler is C code and needs no GIL, so it answers while an extension holds the
GIL. It is the last resort: it reads frames that may change meanwhile, which can crash the process.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
from pathlib import Path
from types import FrameType

from craft.settings.files.private_files import append_private
from craft.wire.activity import STACKS_SIGNAL

logger = logging.getLogger(__name__)

MAX_CHARS = 16 * 1024


def register(path: Path | None) -> None:
    """Append the stacks of all threads to ``path`` at each signal; None: do nothing.

    Forked processes, such as data loaders, append to the same file.
    """
    if path is None:
        return
    # Stays open for the life of the process: the handler cannot open files.
    try:
        fd = append_private(path)
    except OSError as error:
        logger.error("cannot write the stacks of this worker: %s", error)
        return
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def of_all_threads() -> str:
    """Return the stacks of all other threads, formatted as the handler writes them; the main thread's last."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    others = [ident for ident in frames if ident not in (main, threading.get_ident())]
    return "\n".join(_format(ident, frames[ident]) for ident in (*others, main) if ident in frames)


def _format(ident: int | None, frame: FrameType | None) -> str:
    lines = [f"Thread 0x{ident or 0:016x} (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"
