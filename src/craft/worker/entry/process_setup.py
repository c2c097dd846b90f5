"""Prepare a worker's process before its script runs: heap, stack dumps, and the sockets of multiprocessing."""

from __future__ import annotations

import logging
import os
from multiprocessing import current_process
from pathlib import Path

import torch

from craft.settings.rundir import RunDir
from craft.settings.worker import WorkerSettings, multiprocessing_folder
from craft.worker.report import stacks

logger = logging.getLogger(__name__)

_MAX_BYTES = 107 - len("/listener-12345678")
"""The path of a Unix socket has at most 107 bytes."""
_LARGEST_BLOCK = 31 << 20
"""Just below the size from which on glibc no longer adapts its thresholds."""


def prepare(settings: WorkerSettings) -> None:
    """Let the agent clean up after this process and read its stacks; outside of ``craft run`` this does nothing."""
    use_agent_folder(settings.activity)
    stacks.register(RunDir(settings.run_dir).stacks(settings.worker_id) if settings.run_dir is not None else None)


def use_agent_folder(activity: Path | None) -> None:
    """Put the sockets of multiprocessing beside the file ``activity``, where the agent removes them; None: no agent.

    Python would make a folder ``pymp-*`` in the temporary directory, which stays behind when the process is killed. The
    script's files in the temporary directory are not touched: caches of compiled code are kept there.
    """
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
    # ``multiprocessing.util.get_temp_dir`` reads it; child processes inherit it.
    vars(current_process())["_config"].setdefault("tempdir", str(folder))


def reuse_freed_memory() -> None:
    """Raise glibc's trim threshold so that steps reuse freed memory.

    glibc returns the end of its heap to the kernel once more is free there than twice the largest block that it ever freed;
    the next step then takes a page fault per page. Freeing one large block, of which no page is touched, raises that limit.
    Settings of the user (``MALLOC_...``) still apply.
    """
    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8)
