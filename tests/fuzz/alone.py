"""Run scripts outside of ``craft run``, as jobs of one worker, in forks of one process that has imported torch already.

    python -m tests.fuzz.alone

Reads a line per run: the directory in which ``script.py`` is. Writes a line for each: its exit code. What the script
prints goes to ``alone.log`` beside it.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # The first optimizer of a process imports it, which takes longer than a script.

import craft.worker.entry.join

IMPORTED = (np, torch, torch._dynamo, craft.worker.entry.join)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run(Path(line.strip()))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    # Nothing is left to tidy up, and that would take seconds on a busy machine.
    os._exit(0)


def _run(folder: Path) -> None:
    """Become the script; never returns."""
    os.chdir(folder)
    log = os.open("alone.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 0
    try:
        runpy.run_path("script.py", run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
