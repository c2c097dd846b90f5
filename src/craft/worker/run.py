"""Run the user's script in this process, and tell the agent how it ended. Called in the child of the fork server."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from craft.protocol.errors import BitsDiffer, CallsDiffer, ConfigError, Refused, StateLost
from craft.protocol.events import WorkerFailed
from craft.settings.rundir import RunDir
from craft.settings.worker import WorkerSettings
from craft.worker import adapters, join, stacks
from craft.worker.channel import Channel
from craft.worker.devices import is_hardware_fault
from craft.worker.job import finish, place_of

_MAX_TRACEBACK_CHARS = 20_000


def run_script(script: str, arguments: Sequence[str], *, as_module: bool, worker_id: str) -> int:
    """Run a script (or a module) as ``__main__`` and return the exit code of this process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run_dir = WorkerSettings.from_environment().run_dir
    stacks.register(RunDir(run_dir).stacks(worker_id) if run_dir is not None else None)
    channel = join.connect()
    join.set_aside()
    adapters.await_frameworks()
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
                f"{script} ended without calling craft.join() or craft.attend(): it is not a training script of CRAFT's"
            )
        _finish()
    except SystemExit as error:
        code = _exit_code(error)
        if code == 0:
            _finish()
        if code != 0:
            # As any exception: a fault where one worker raises it, a bug where the next one does, too.
            _report(channel, error, worker_id)
    except (BitsDiffer, StateLost):
        code = 1
        traceback.print_exc()
    except BaseException as error:  # noqa: BLE001  (the edge of a process: it is reported, and decides the exit code)
        code = 1
        _report(channel, error, worker_id)
    _leave(channel)
    return code


def _finish() -> None:
    """Steps of CRAFT's own finish by themselves; of any other loop only the end of the script is known."""
    job, guest = join.joined(), join.attending()
    if job is not None:
        finish(job)
    if guest is not None:
        guest.finish()


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _story(error: BaseException) -> str:
    """The traceback, from the user's script on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _report(channel: Channel | None, error: BaseException, worker_id: str) -> None:
    print(_story(error), file=sys.stderr, end="")
    tell(channel, error, worker_id)


def tell(channel: Channel | None, error: BaseException, worker_id: str) -> None:
    """Tell the agent by which exception the script ends."""
    # Every worker raises these at the same step, and has said so already.
    if channel is None or isinstance(error, BitsDiffer | StateLost):
        return
    job = join.joined()
    guest = join.attending()
    step, microbatch = place_of(job) if job is not None else (None if guest is None else guest.place, None)
    channel.report(
        failed=WorkerFailed(
            worker_id=worker_id,
            error=_sentence(error)[-2000:],
            traceback=_story(error)[-_MAX_TRACEBACK_CHARS:],
            step=step,
            microbatch=microbatch,
            late=WorkerSettings.from_environment().late,
            refused=isinstance(error, Refused),
            everywhere=isinstance(error, CallsDiffer),
            hardware=is_hardware_fault(error),
            time=time.time(),
        )
    )


def _sentence(error: BaseException) -> str:
    if isinstance(error, Refused):
        return str(error)
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _leave(channel: Channel | None) -> None:
    """End as an interpreter would, short of tearing down torch: a thread that hangs in Gloo would make that crash."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if channel is not None:
        channel.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
