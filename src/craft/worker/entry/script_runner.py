"""Run the user's script in this process and report how it ended. Called in the child of the fork server."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import sys
import threading
import time
from collections.abc import Sequence

from craft.protocol.errors import BitsDiffer, CallsDiffer, ConfigError, NewcomerDiffers, Refused, ScriptLeft, StateLost
from craft.protocol.events import WorkerFailed
from craft.settings.worker import WorkerSettings
from craft.telemetry.text import logs
from craft.worker.api.adapter_access import finish as finish_job
from craft.worker.api.adapter_access import left_in_step, place_of
from craft.worker.entry import framework_imports, join, process_setup
from craft.worker.entry.script_errors import real_error, script_traceback, summary
from craft.worker.membership.devices import is_hardware_fault
from craft.worker.report.channel import Channel

logger = logging.getLogger(__name__)

_MAX_TRACEBACK_CHARS = 20_000


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
        if join.joined() is None and join.attending() is None:
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


def finish() -> None:
    """Wait until the script has ended on all workers; a guest does not wait.

    Raises ScriptLeft if it ended in the middle of its training loop.
    """
    job, guest = join.joined(), join.attending()
    if job is not None:
        finish_job(job)
        step = left_in_step(job)
        if step is not None:
            raise ScriptLeft(
                f"the script left before its end, in the middle of step {step}, without an error. Leave a training loop only"
                " between two steps: by break, on all workers in the same step, or by job.stop(reason) on any worker"
            )
    if guest is not None:
        guest.finish()
    channel = join.connect()
    if job is None and guest is None and channel is not None:
        # The script ended before it joined: there was nothing to train.
        channel.report(script_ended=True)


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


def _traceback(error: BaseException) -> str:
    """Return the traceback, from the user's script on."""
    return script_traceback(error, __file__, "<frozen runpy>")


def _report(channel: Channel | None, error: BaseException, worker_id: str) -> None:
    real = real_error(error)
    if isinstance(real, BitsDiffer | StateLost):
        # The job ends with this message; a traceback would only show where CRAFT found it.
        logger.info("%s", real)
    else:
        print(_traceback(error), file=sys.stderr, end="")
    report_failure(channel, error, worker_id)


def report_failure(channel: Channel | None, error: BaseException, worker_id: str) -> None:
    """Report to the agent the exception that ends the script."""
    real = real_error(error)
    # Every worker raises these at the same step and has already reported them.
    if channel is None or isinstance(real, BitsDiffer | StateLost):
        return
    job = join.joined()
    guest = join.attending()
    step, microbatch = place_of(job) if job is not None else (None if guest is None else guest.place, None)
    channel.report(
        failed=WorkerFailed(
            worker_id=worker_id,
            error=summary(error)[-2000:],
            traceback=_traceback(error)[-_MAX_TRACEBACK_CHARS:],
            step=step,
            # No microbatch is at fault where the script left the loop: a replacement would leave there, too.
            microbatch=None if isinstance(real, ScriptLeft) else microbatch,
            late=WorkerSettings.from_environment().late or isinstance(real, NewcomerDiffers),
            refused=isinstance(real, Refused),
            everywhere=isinstance(real, CallsDiffer),
            hardware=is_hardware_fault(real),
            time=time.time(),
        )
    )


def _leave(channel: Channel | None) -> None:
    """Run the interpreter's exit handlers without tearing down torch, which crashes if a thread hangs in Gloo."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if channel is not None:
        channel.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
