"""Where Python's multiprocessing keeps the sockets of this worker: with the agent, which removes them if it is killed.

Python would make a folder ``pymp-*`` in the temporary directory, and remove it when the process ends in order. What the
script itself puts into the temporary directory is not touched: caches of compiled code are kept there.
"""

from __future__ import annotations

import logging
import os
from multiprocessing import current_process
from pathlib import Path

from craft.settings.worker import multiprocessing_folder

logger = logging.getLogger(__name__)

_MAX_BYTES = 107 - len("/listener-12345678")
"""The path of a Unix socket has at most 107."""


def keep_with_agent(activity: Path | None) -> None:
    """Use a folder beside the file ``activity``, in this process and those that it starts; None: there is no agent."""
    if activity is None:
        return
    folder = multiprocessing_folder(activity)
    if len(os.fsencode(folder)) > _MAX_BYTES:
        logger.info("multiprocessing uses the temporary directory: %s is too long for the path of a socket", folder)
        return
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        logger.info("multiprocessing uses the temporary directory: %s", error)
        return
    # What ``multiprocessing.util.get_temp_dir`` looks at; processes that are started inherit it.
    vars(current_process())["_config"].setdefault("tempdir", str(folder))
