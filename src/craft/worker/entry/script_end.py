"""How a script ends: wait for the other workers, or report the error. ``script_runner`` calls it, or an ``EndReporter``."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from craft.groups.gloo import THREADS
from craft.protocol.errors import BitsDiffer, CallsDiffer, NewcomerDiffers, Refused, ScriptLeft, StateLost
from craft.protocol.events import WorkerFailed
from craft.settings.worker import WorkerSettings
from craft.worker.api.adapter_access import finish as finish_job
from craft.worker.api.adapter_access import left_in_step, place_of
from craft.worker.entry.script_errors import real_error, script_traceback, summary
from craft.worker.entry.worker_process import process
from craft.worker.membership.devices import is_hardware_fault
from craft.worker.report.channel import Channel

_MAX_TRACEBACK_CHARS = 20_000
_END_LIMIT_S = 3.0
_RUNNERS = (str(Path(__file__).with_name("script_runner.py")), "<frozen runpy>")


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
            hardware=is_hardware_fault(real),
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
