"""Run the user's script in this process and report how it ended. Called in the child of the fork server."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import sys
import threading
from collections.abc import Sequence

from craft.protocol.errors import BitsDiffer, ConfigError, NewcomerDiffers, Refused, ScriptLeft, StateLost
from craft.settings.worker import WorkerSettings
from craft.telemetry.text import logs
from craft.worker.entry import framework_imports, join, process_setup
from craft.worker.entry.script_end import finish, real_error, report_failure, traceback_of
from craft.worker.entry.worker_process import process
from craft.worker.report.channel import Channel

logger = logging.getLogger(__name__)


def run_script(script: str, arguments: Sequence[str], *, as_module: bool, worker_id: str) -> int:
    """Run a script (or a module) as ``__main__`` and return the exit code of this process."""
    logs.begin(logging.INFO, logs.IN_FILES, "craft")
    settings = WorkerSettings.from_environment()
    logs.hide(settings.state_key)
    process_setup.prepare(settings)
    channel = join.connect()
    join.reserve_memory()
    framework_imports.await_frameworks()
    sys.argv = [script, *arguments]
    code = 0
    try:
        if as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
        if process.job is None and process.guest is None:
            raise ConfigError(
                f"{script} ended without calling craft.join() or craft.attend(): it is not a CRAFT training script"
            )
        finish()
    except SystemExit as error:
        code = _exit_code(error)
        if code == 0:
            code = _finish_after_exit(channel, error, worker_id)
        else:
            # Like any exception: a fault if one worker raises it, a bug if its replacement does, too.
            _report(channel, error, worker_id)
    except BaseException as error:  # noqa: BLE001  (the edge of a process: it is reported, and decides the exit code)
        code = 1
        _report(channel, error, worker_id)
    _leave(channel)
    return code


def _finish_after_exit(channel: Channel | None, error: SystemExit, worker_id: str) -> int:
    """Return the exit code of this process after the script called ``sys.exit(0)``."""
    try:
        finish()
    except ScriptLeft as left:
        left.__cause__ = error
        _report(channel, left, worker_id)
        return 1
    return 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _report(channel: Channel | None, error: BaseException, worker_id: str) -> None:
    real = real_error(error)
    if isinstance(real, BitsDiffer | StateLost | NewcomerDiffers) or type(real) is Refused:
        # This message is the whole reason: the script is fine, and a traceback would only show where CRAFT found it.
        logger.info("%s", real)
    else:
        print(traceback_of(error), file=sys.stderr, end="")
    report_failure(channel, error, worker_id)


def _leave(channel: Channel | None) -> None:
    """Run the interpreter's exit handlers without tearing down torch, which crashes if a thread hangs in Gloo."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if channel is not None:
        channel.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
