"""The fork server: a process without threads that imports torch, forks workers and reaps them.

Its socket carries one JSON value per line. In: ``Fork``. Out: ``Ready``, ``Forked``, ``NotForked``, ``Ended``. When the socket
closes, it kills every worker and ends: workers do not outlive their agent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from craft.agent.linux import syscalls
from craft.settings.environ import without_cuda
from craft.settings.files.private_files import append_private
from craft.telemetry.text import stdio
from craft.telemetry.text.plain_text import one_line


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a worker."""

    worker_id: str
    script: str
    arguments: tuple[str, ...]
    as_module: bool
    environment: dict[str, str]
    log: str
    """The file for its standard output and error."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Torch is imported: forks are fast from now on."""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    worker_id: str
    pid: int


class NotForked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The system refused a process for a worker, for now."""

    worker_id: str
    why: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's process ended."""

    worker_id: str
    exit_code: int | None
    signal: int | None
    time: float
    why: str = ""
    """What else is known, as the end of a sentence."""


Outgoing = Ready | Forked | NotForked | Ended


class ForkServer:
    """Forks and reaps workers. Single-threaded: in a fork, locks that other threads hold would stay locked for ever."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._workers: dict[int, str] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._send(Ready())
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        pending = b""
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._channel.fileno() in ready:
                data = b""
                # Reset: the agent ended with unread messages.
                with contextlib.suppress(ConnectionResetError):
                    data = self._channel.recv(1 << 16)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._fork(msgspec.json.decode(line, type=Fork))
        self._end_all()

    def _fork(self, request: Fork) -> None:
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            # Too many processes, or too little memory. Running workers go on.
            self._send(NotForked(worker_id=request.worker_id, why=error.strerror or str(error)))
            return
        if pid == 0:
            code = 1
            try:
                self._become_worker(request, server_pid)
                from craft.worker.entry.script_runner import run_script

                code = run_script(
                    request.script, request.arguments, as_module=request.as_module, worker_id=request.worker_id
                )
            except Exception as error:  # noqa: BLE001  (the edge of the process)
                text = f"craft: {request.worker_id} cannot begin: {type(error).__name__}: {error}"
                print(one_line(text), file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        self._workers[pid] = request.worker_id
        self._send(Forked(worker_id=request.worker_id, pid=pid))

    def _become_worker(self, request: Fork, server_pid: int) -> None:
        syscalls.end_with_parent(server_pid)
        # Its daemonized children are re-parented to it, and to the fork server once it ends.
        syscalls.adopt_orphans()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A new session: the agent handles Ctrl-C, and what the worker forks is in its process group and ends with it.
        os.setsid()
        self._channel.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        log = _open_log(request.log)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        stdio.forgive()
        os.environ.update(request.environment)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker_id = self._workers.pop(pid, None)
            if worker_id is None:
                continue
            self._send(
                Ended(
                    worker_id=worker_id,
                    exit_code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                    signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                    time=time.time(),
                )
            )
            self._end_orphans(pid)

    def _end_orphans(self, pid: int) -> None:
        """Kill what a dead worker forked: its loader processes hold its sockets open, and peers would wait for them."""
        syscalls.kill_group(pid)
        for child in syscalls.children():
            # A child that is not a worker was re-parented here when its worker died.
            if child not in self._workers:
                syscalls.kill(child)

    def _end_all(self) -> None:
        for pid in list(self._workers):
            syscalls.kill_group(pid)
            syscalls.kill(pid)
        deadline = time.monotonic() + 5
        while syscalls.children() and time.monotonic() < deadline:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return
            for child in syscalls.children():
                if child not in self._workers:
                    syscalls.kill(child)

    def _send(self, message: Outgoing) -> None:
        # The end of the agent is noticed where its requests are read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(msgspec.json.encode(message) + b"\n")


def _open_log(path: str) -> int:
    try:
        return append_private(Path(path))
    except OSError as error:
        # Only a record: the worker trains without it.
        print(one_line(f"craft: {path} cannot be written: {error.strerror}"), file=sys.stderr, flush=True)
        return os.open(os.devnull, os.O_WRONLY)


def _preload(module: str) -> None:
    """Import a module that scripts need. Print a failure and go on: the script may not need it, or say more."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (another package's code: what it raises is told)
        print(one_line(f"craft: --preload {module}: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)


def main() -> None:
    """Run the process. Arguments: the socket's file descriptor, the agent's process id, further modules to import."""
    fd, agent_pid = int(sys.argv[1]), int(sys.argv[2])
    syscalls.end_with_parent(agent_pid)
    syscalls.adopt_orphans()
    # Imported once for all workers: torch's optimizers import its compiler, which takes about as long as torch.
    import torch._dynamo
    import torch.utils.data

    import craft.worker.api.job
    import craft.worker.entry.script_runner  # noqa: F401

    with without_cuda():
        for module in sys.argv[3:]:
            _preload(module)
    torch.set_num_threads(torch.get_num_threads())
    # Exclude imported objects from garbage collection: they do not keep workers from finding their own garbage, and their
    # pages stay shared.
    gc.freeze()
    ForkServer(socket.socket(fileno=fd)).serve()
    # An orderly shutdown of torch would delay the agent by most of a second.
    os._exit(0)


if __name__ == "__main__":
    main()
