"""A process that torchrun started becomes a worker: it asks the agent of its torchrun, which the first one to come starts.

``craft.join()`` and ``craft.attend()`` call ``seek_agent``. The agent (``agent/torchrun_agent.py``) is a process of its own, in a
session of its own: it outlives the workers, whom torchrun ends and starts again all together.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import msgspec

from craft.groups.gloo import THREADS
from craft.protocol.errors import ConfigError, ScriptLeft, Unreachable
from craft.protocol.values.attach import Adopt, Adopted
from craft.settings import torchrun
from craft.settings.files.private_files import append_private, make_folder, open_private
from craft.settings.rundir import RunDir
from craft.settings.torchrun import Launched
from craft.settings.worker import WorkerSettings
from craft.telemetry.text.plain_text import one_line
from craft.wire.activity import memory_folder

_AGENT = "craft.agent.torchrun_agent"
"""Above this room: named here, and run as a process."""
_START_S = 120.0
_AGAIN_S = 0.02
_LAST_S = 3.0
_MAX_ANSWER_BYTES = 1 << 20


def seek_agent() -> bool:
    """Where torchrun started this process for a lighthouse's job: become a worker of it. Returns whether it was so."""
    launched = torchrun.launched()
    if launched is None:
        return False
    with _meet(launched) as line:
        adopted = _ask(line, launched)
    if not adopted.environment:
        print(one_line(f"craft: {adopted.reason}"), file=sys.stderr)
        raise SystemExit(adopted.exit_code)
    if launched.local_rank == 0 and launched.restarts == 0 and (warning := torchrun.hash_seed_warning()):
        # Once on a host: it is the same for all whom this torchrun starts.
        print(one_line(f"craft: {warning}"), file=sys.stderr, flush=True)
    torchrun.take_over(adopted.environment)
    return True


def _folder(launched: Launched) -> Path:
    """Where the agent of this torchrun is met: known by all whom the same torchrun started, and private."""
    place = f"{os.getppid()}/{launched.run_id}/{launched.lighthouse}"
    name = f"craft-torchrun-{os.getuid()}-{hashlib.blake2b(place.encode(), digest_size=8).hexdigest()}"
    folder = memory_folder() / name
    try:
        make_folder(folder)
    except OSError as error:
        raise ConfigError(f"workers cannot meet their agent in {folder}: {error.strerror}. Have it removed") from None
    return folder


def _meet(launched: Launched) -> socket.socket:
    """Connect to the agent; the first one to come starts it."""
    folder = _folder(launched)
    with open(open_private(folder / "starting", os.O_WRONLY | os.O_CREAT), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = _connect(folder)
        return line if line is not None else _start(folder, launched)


def _connect(folder: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(str(folder / "adopt"))
    except OSError:
        line.close()
        return None
    return line


def _start(folder: Path, launched: Launched) -> socket.socket:
    RunDir(launched.run_dir).create()
    log = launched.run_dir / "agent.log"
    with open(append_private(log), "ab") as file:
        before = file.tell()
        arguments = (str(folder), str(os.getppid()), str(launched.run_dir), str(launched.local_world_size))
        agent = subprocess.Popen(
            [sys.executable, "-m", _AGENT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # torchrun ends a worker with all of its session.
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_S
    while (line := _connect(folder)) is None:
        if agent.poll() is not None or time.monotonic() > deadline:
            agent.kill()
            said = log.read_bytes()[before:].decode(errors="replace").strip()
            raise ConfigError(said.removeprefix("craft: ") or f"the agent did not start: see {log}")
        time.sleep(_AGAIN_S)
    return line


def _ask(line: socket.socket, launched: Launched) -> Adopted:
    request = Adopt(pid=os.getpid(), local_rank=launched.local_rank)
    try:
        line.sendall(msgspec.json.encode(request) + b"\n")
        with line.makefile("rb") as answers:
            answer = answers.readline(_MAX_ANSWER_BYTES)
        return msgspec.json.decode(answer, type=Adopted)
    except (OSError, msgspec.DecodeError) as error:
        raise Unreachable(f"the agent of this host's workers ended: see {launched.run_dir / 'agent.log'}") from error


class Ending:
    """How the script ends, which is not CRAFT's to run: told where its interpreter says so."""

    def __init__(self) -> None:
        self._code: object = 0
        self._hook, self._exit = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self._failed, self._exits
        atexit.register(self._over)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from craft.worker.entry import join, script_runner

        self._code = 1
        self._hook(kind, error, trace)
        script_runner.tell(join.connect(), error, WorkerSettings.from_environment().worker_id)

    def _exits(self, code: object = None) -> NoReturn:
        self._code = code
        raise SystemExit(code)

    def _over(self) -> None:
        from craft.worker.entry import join, script_runner

        channel = join.connect()
        left = False
        if self._code in (0, None):
            try:
                script_runner.finish()
            except ScriptLeft as error:
                print(f"craft: {error}", file=sys.stderr)
                script_runner.tell(channel, error, WorkerSettings.from_environment().worker_id)
                self._code, left = 1, True
        if channel is not None:
            channel.flush()
        # A thread that comes out of a group while the interpreter is taken down would end the process with SIGABRT.
        deadline = time.monotonic() + _LAST_S
        groups = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
        for thread in groups:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in groups) or left:
            # One that hangs, left behind with its group; or torchrun would see 0. What else is done at exit is left out.
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(self._code if isinstance(self._code, int) else int(self._code is not None))
