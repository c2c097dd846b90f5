"""Attach a process that torchrun started to the agent of its torchrun; the first process starts that agent.

``craft.join()`` and ``craft.attend()`` call ``attach_to_agent``. The agent (``agent/torchrun_agent.py``) is a separate process in
a separate session: it outlives the workers, which torchrun ends and restarts all together.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from craft.protocol.errors import ConfigError, Unreachable
from craft.protocol.values.attach import Adopt, Adopted
from craft.settings import torchrun
from craft.settings.files.private_files import append_private, make_folder, open_private
from craft.settings.rundir import RunDir
from craft.settings.torchrun import Launched
from craft.telemetry.text.plain_text import one_line
from craft.wire.activity import memory_folder

_AGENT = "craft.agent.torchrun_agent"
"""Above this package: only named here, and run as a process."""
_START_LIMIT_S = 120.0
_RETRY_S = 0.02
_MAX_ANSWER_BYTES = 1 << 20


def attach_to_agent() -> bool:
    """Become a worker of a lighthouse's job if torchrun started this process for it; return whether it did."""
    launched = torchrun.launched()
    if launched is None:
        return False
    with _connect_or_start(launched) as connection:
        adopted = _request(connection, launched)
    if not adopted.environment:
        print(one_line(f"craft: {adopted.reason}"), file=sys.stderr)
        raise SystemExit(adopted.exit_code)
    if launched.local_rank == 0 and launched.restarts == 0 and (warning := torchrun.hash_seed_warning()):
        # Once per host: it is the same for all workers of this torchrun.
        print(one_line(f"craft: {warning}"), file=sys.stderr, flush=True)
    torchrun.take_over(adopted.environment)
    return True


def _folder(launched: Launched) -> Path:
    """Return the private folder of this torchrun's agent: its name is the same for all processes of that torchrun."""
    key = f"{os.getppid()}/{launched.run_id}/{launched.lighthouse}"
    name = f"craft-torchrun-{os.getuid()}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    folder = memory_folder() / name
    try:
        make_folder(folder)
    except OSError as error:
        raise ConfigError(f"cannot use {folder} to reach the agent: {error.strerror}. Have it removed") from None
    return folder


def _connect_or_start(launched: Launched) -> socket.socket:
    """Connect to the agent; the first process starts it."""
    folder = _folder(launched)
    with open(open_private(folder / "starting", os.O_WRONLY | os.O_CREAT), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        connection = _connect(folder)
        return connection if connection is not None else _start(folder, launched)


def _connect(folder: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(folder / "adopt"))
    except OSError:
        connection.close()
        return None
    return connection


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
            # torchrun ends a worker with its whole session.
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_LIMIT_S
    while (connection := _connect(folder)) is None:
        if agent.poll() is not None or time.monotonic() > deadline:
            agent.kill()
            output = log.read_bytes()[before:].decode(errors="replace").strip()
            raise ConfigError(output.removeprefix("craft: ") or f"the agent did not start: see {log}")
        time.sleep(_RETRY_S)
    return connection


def _request(connection: socket.socket, launched: Launched) -> Adopted:
    request = Adopt(pid=os.getpid(), local_rank=launched.local_rank)
    try:
        connection.sendall(msgspec.json.encode(request) + b"\n")
        with connection.makefile("rb") as answers:
            answer = answers.readline(_MAX_ANSWER_BYTES)
        return msgspec.json.decode(answer, type=Adopted)
    except (OSError, msgspec.DecodeError) as error:
        raise Unreachable(f"the agent of this host's workers ended: see {launched.run_dir / 'agent.log'}") from error
