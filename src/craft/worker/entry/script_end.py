"""How a script ends: wait for the other workers, or find and report its error, also one that became an exit code.

``script_runner`` calls it or, for a script that CRAFT does not run, an ``EndReporter``.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from craft.groups.gloo import THREADS
from craft.protocol.errors import BitsDiffer, CallsDiffer, LeftBehind, NewcomerDiffers, Refused, ScriptLeft, StateLost
from craft.protocol.events import WorkerFailed
from craft.settings.worker import WorkerSettings
from craft.worker.api.adapter_access import finish as finish_job
from craft.worker.api.adapter_access import left_in_step, place_of, replica_broke
from craft.worker.entry.worker_process import process
from craft.worker.membership.devices import is_hardware_fault
from craft.worker.report.channel import Channel

_MAX_TRACEBACK_CHARS = 20_000
_END_LIMIT_S = 3.0
_RUNNERS = (str(Path(__file__).with_name("script_runner.py")), "<frozen runpy>")
_REFUSED = 2


def real_error(raised: BaseException) -> BaseException:
    """Return the exception that was being handled when the script called ``sys.exit`` with a number other than 0.

    hydra's and click's main functions print an exception and exit. An exit with a message is its own error.
    """
    error = raised
    while isinstance(error, SystemExit) and isinstance(error.code, int) and error.code != 0:
        behind = error.__cause__ if error.__suppress_context__ else error.__context__ or _held_by_frame(error)
        if behind is None:
            break
        error = behind
    return error


def _held_by_frame(error: SystemExit) -> BaseException | None:
    """Return an exception that the exiting function has caught and still holds.

    click (8.5) leaves its ``except`` block before it exits, with the exception's ``show`` in a variable.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    held = [] if frames is None else [getattr(each, "__self__", each) for each in frames.tb_frame.f_locals.values()]
    raised = (each for each in held if isinstance(each, BaseException) and each.__traceback__ is not None)
    return next((each for each in raised if each is not error), None)


def summary(raised: BaseException) -> str:
    """Return the error in one sentence, with the exit code that it was turned into."""
    error = real_error(raised)
    if isinstance(error, Refused):
        return str(error)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    if error is raised or not isinstance(raised, SystemExit):
        return text
    return f"{text} (the script then exited with code {raised.code})"


def script_traceback(raised: BaseException, *skipped_files: str) -> str:
    """Return the traceback of the error, without leading frames in ``skipped_files``."""
    error = real_error(raised)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in skipped_files:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def exit_with_refusal_code() -> None:
    """Make ``python script.py`` exit with 2, as ``craft run`` does, when CRAFT refuses the script."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Refused):
            # The interpreter takes the exit code of a SystemExit that its hook raises.
            raise SystemExit(_REFUSED)

    sys.excepthook = hook


def finish() -> None:
    """Wait until the script has ended on all workers; a guest does not wait.

    Raises ScriptLeft if it ended in the middle of its training loop.
    """
    job, guest, channel = process.job, process.guest, process.channel
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
    if job is None and guest is None and channel is not None:
        # The script ended before it joined: there was nothing to train.
        channel.report(script_ended=True)


def traceback_of(error: BaseException) -> str:
    """Return the traceback, from the user's script on."""
    return script_traceback(error, *_RUNNERS)


def report_failure(channel: Channel | None, error: BaseException, worker_id: str) -> None:
    """Report to the agent the exception that ends the script."""
    real = real_error(error)
    # Every worker raises these at the same step and has already reported them.
    if channel is None or isinstance(real, BitsDiffer | StateLost):
        return
    job, guest = process.job, process.guest
    step, microbatch = place_of(job) if job is not None else (None if guest is None else guest.place, None)
    channel.report(
        failed=WorkerFailed(
            worker_id=worker_id,
            error=summary(error)[-2000:],
            traceback=traceback_of(error)[-_MAX_TRACEBACK_CHARS:],
            step=step,
            # No microbatch is at fault where the script left the loop: a replacement would leave there, too.
            microbatch=None if isinstance(real, ScriptLeft) else microbatch,
            late=WorkerSettings.from_environment().late or isinstance(real, NewcomerDiffers),
            refused=isinstance(real, Refused),
            everywhere=isinstance(real, CallsDiffer),
            hardware=is_hardware_fault(real)
            or isinstance(real, LeftBehind)
            or (job is not None and replica_broke(job)),
            time=time.time(),
        )
    )


class EndReporter:
    """Reports how a script ends that CRAFT does not run, from hooks of its interpreter."""

    def __init__(self) -> None:
        self._code: object = 0
        self._hook, self._exit = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self._failed, self._exits
        atexit.register(self._over)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._code = 1
        self._hook(kind, error, trace)
        report_failure(process.channel, error, WorkerSettings.from_environment().worker_id)

    def _exits(self, code: object = None) -> NoReturn:
        self._code = code
        raise SystemExit(code)

    def _over(self) -> None:
        channel, left = process.channel, False
        if self._code in (0, None):
            try:
                finish()
            except ScriptLeft as error:
                print(f"craft: {error}", file=sys.stderr)
                report_failure(channel, error, WorkerSettings.from_environment().worker_id)
                self._code, left = 1, True
        if channel is not None:
            channel.flush()
        # A thread that returns from a group while the interpreter shuts down would end the process with SIGABRT.
        deadline = time.monotonic() + _END_LIMIT_S
        groups = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
        for thread in groups:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in groups) or left:
            # A thread still hangs in its group, or torchrun would see 0. Skip the other exit handlers.
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(self._code if isinstance(self._code, int) else int(self._code is not None))
