"""The operating system of all simulated hosts: what production code asks asyncio, ``os`` and ``time`` for.

``Machine`` is the event loop: child processes, Unix sockets, signals and threads are its methods in asyncio already, so that
production code needs to know nothing. ``stand_in`` puts it in the place of the few functions of ``os``, ``time`` and
``secrets`` that are called directly, for as long as a simulation runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from .clock import CURRENT, EPOCH, KERNEL, Process, SimulatedLoop
from .streams import Far, UnixServer

_THREAD_S = 0.004


class Child(Protocol):
    """A simulated program that was started as a child process."""

    process: Process

    def begin(self, say: Callable[[bytes], None]) -> None:
        """Run; ``say`` is its standard output."""

    def hear(self, data: bytes) -> None:
        """Take what arrives on its channel; b"": the other end is closed."""

    def attach(self, channel: Far) -> None:
        """Its channel to whoever started it."""


Program = Callable[[Sequence[str], Process], Child]


class Machine(SimulatedLoop):
    """All hosts, on one clock."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.programs: dict[str, Program] = {}
        """What is run by which word on a command line."""
        self._sockets: dict[str, Callable[[], Any]] = {}
        self._waiting: list[Child] = []
        """Children that were given a channel which its parent has not opened yet."""

    # Unix sockets

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        self._sockets[path] = protocol_factory
        return UnixServer(lambda: self._sockets.pop(path, None) and None)

    def connect(self, path: str, hear: Callable[[bytes], None]) -> Far | None:
        """Connect to a Unix socket; None if nobody listens there."""
        factory = self._sockets.get(path)
        if factory is None:
            return None
        far = Far(self, factory(), hear)
        far.open()
        return far

    # Child processes

    async def subprocess_exec(self, protocol_factory: Any, *args: Any, **_: Any) -> Any:
        parent = CURRENT.get()
        assert parent is not None
        words = [str(each) for each in args]
        program = next(self.programs[word] for word in words if word in self.programs)
        protocol = protocol_factory()
        child = program(words, parent)
        transport = ChildTransport(self, child, protocol)
        protocol.connection_made(transport)
        self._waiting.append(child)
        child.begin(transport.said)
        return transport, protocol

    async def create_connection(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        """Only of a socket that the child which was started last has the other end of."""
        sock.close()
        child = self._waiting.pop()
        protocol = protocol_factory()
        far = Far(self, protocol, child.hear)
        far.open()
        child.attach(far)
        return far.near, protocol

    # Signals and threads

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        process = CURRENT.get()
        assert process is not None
        process.handlers[sig] = lambda: callback(*args)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """A thread's work takes a moment, and is done at its end."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001  (handed to who waits for it)
                future.set_exception(error)

        self.call_later(_THREAD_S, work)
        return future

    def kill(self, pid: int, number: int) -> None:
        """``os.kill``."""
        process = self.processes.get(pid)
        if process is None or process.state == "dead":
            raise ProcessLookupError(f"no simulated process {pid}")
        process.kill(number)

    def getpid(self) -> int:
        """``os.getpid``."""
        process = CURRENT.get()
        return process.pid if process is not None else 1

    def state_of(self, pid: int) -> str:
        """The kernel's letter for the state of a process."""
        process = self.processes.get(pid)
        return {"running": "S", "hung": "R", "stopped": "T", "dead": ""}[process.state] if process is not None else ""


class ChildTransport(asyncio.SubprocessTransport):
    """Asyncio's view of a child process; standard output and error are always pipes."""

    def __init__(self, machine: Machine, child: Child, protocol: Any) -> None:
        super().__init__()
        self._machine = machine
        self._child = child
        self._protocol = protocol
        self._ended: list[asyncio.Future[int]] = []
        child.process.on_exit.append(self._exited)

    def said(self, data: bytes) -> None:
        self._machine.call_soon(self._protocol.pipe_data_received, 1, data, context=KERNEL)

    def _exited(self) -> None:
        for fd in (1, 2):
            self._protocol.pipe_connection_lost(fd, None)
        self._protocol.process_exited()
        for future in self._ended:
            if not future.done():
                future.set_result(self._child.process.code or 0)

    def get_pid(self) -> int:
        return self._child.process.pid

    def get_returncode(self) -> int | None:
        return self._child.process.code

    def get_pipe_transport(self, fd: int) -> Any:
        return _Pipe() if fd in (1, 2) else None

    def kill(self) -> None:
        self._child.process.kill(signal.SIGKILL)

    def terminate(self) -> None:
        self._child.process.kill(signal.SIGTERM)

    def close(self) -> None:
        """All of it ends with the process."""

    async def _wait(self) -> int:
        if self._child.process.code is not None:
            return self._child.process.code
        future: asyncio.Future[int] = self._machine.create_future()
        self._ended.append(future)
        return await future


class _Pipe(asyncio.ReadTransport):
    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Ends with its process."""


@contextlib.contextmanager
def stand_in(machine: Machine) -> Iterator[None]:
    """Have ``machine`` be the event loop, the clock and the kernel of all code that runs within."""
    replaced = {
        (time, "time"): lambda: EPOCH + machine.now,
        (time, "monotonic"): machine.time,
        (os, "kill"): machine.kill,
        (os, "getpid"): machine.getpid,
        (secrets, "token_hex"): lambda size=16: f"{machine.random.getrandbits(8 * size):0{2 * size}x}",
    }
    with contextlib.ExitStack() as stack:
        for (module, name), stand_in_for in replaced.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in_for)
        asyncio._set_running_loop(machine)
        stack.callback(asyncio._set_running_loop, None)
        yield
