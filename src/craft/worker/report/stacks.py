"""The stacks of this process's threads, for the agent.

``of_all_threads`` is what a thread of this process answers with. Where none can answer, the agent sends a signal, for which
``register`` is called once at the start of a worker's process. Its handler is C and needs no GIL: it answers while an extension
keeps the GIL. But it looks at frames that may be changing at that very moment, which can end the process: it is the last resort.
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
    """Write the stacks of all threads to the end of ``path`` whenever the signal comes; None: do nothing.

    What this process forks answers as well, into the same file: data-loader processes, for example.
    """
    if path is None:
        return
    # Kept open for the life of the process: the handler can open nothing.
    try:
        fd = append_private(path)
    except OSError as error:
        logger.error("stacks of this worker cannot be written: %s", error)
        return
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def of_all_threads() -> str:
    """The stacks of all threads, in the form in which the handler writes them; the main thread's last, this one's left out."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    others = [ident for ident in frames if ident not in (main, threading.get_ident())]
    return "\n".join(_described(ident, frames[ident]) for ident in (*others, main) if ident in frames)


def _described(ident: int | None, frame: FrameType | None) -> str:
    lines = [f"Thread 0x{ident or 0:016x} (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"
