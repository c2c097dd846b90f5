"""Virtual time: an event loop on which waiting costs nothing, and on which whole processes can be killed or stopped.

Everything that runs on the loop belongs to a ``Process``, by the context (``contextvars``) that its tasks and timers
inherit. The code of a killed process is never run again, not even its ``finally`` blocks, as with SIGKILL. That of a
stopped one waits until it is continued. Code without a process is the simulation's own: wires, timers of the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import signal
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Literal, TypeVar

T = TypeVar("T")

EPOCH = 1_700_000_000.0
"""What the wall clock shows when a simulation begins, in seconds since 1970."""
_ROUNDS = 20
_FIRST_PID = 10_000_000
"""Above all numbers that Linux gives to processes: a call that is not simulated meets no real one."""

CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
KERNEL = Context()
"""What is called in this context is called for no process, and happens whatever becomes of them."""


class Stuck(Exception):
    """Nothing will ever happen again."""


class Process:
    """A simulated process: what runs in its context, and how it ended."""

    def __init__(self, loop: SimulatedLoop, name: str, host: str, parent: Process | None = None) -> None:
        self.loop = loop
        self.name = name
        self.host = host
        self.pid = loop.new_pid(self)
        self.state: Literal["running", "stopped", "hung", "dead"] = "running"
        self.code: int | None = None
        """How it ended; negative: by that signal."""
        self.children: list[Process] = []
        self.handlers: dict[int, Callable[[], None]] = {}
        self.on_exit: list[Callable[[], None]] = []
        """Called in the kernel's context when it has ended."""
        self._context = Context()
        self._context.run(CURRENT.set, self)
        self._parked: list[asyncio.Handle] = []
        if parent is not None:
            parent.children.append(self)

    def soon(self, call: Callable[..., Any], *args: Any) -> None:
        """Call something in this process."""
        self.loop.call_soon(call, *args, context=self._context)

    def later(self, delay_s: float, call: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, call, *args, context=self._context)

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """Call something in this process, at once."""
        return self._context.run(call, *args)

    def park(self, handle: asyncio.Handle) -> None:
        """Keep what was to run while this process is stopped."""
        self._parked.append(handle)

    def kill(self, number: int) -> None:
        """Take a signal."""
        if self.state == "dead":
            return
        if number == signal.SIGSTOP:
            self.state = "stopped"
        elif number == signal.SIGCONT:
            self._go_on()
        elif number == signal.SIGKILL or (number in (signal.SIGTERM, signal.SIGINT) and number not in self.handlers):
            # The default of SIGTERM does not reach a stopped process before it is continued; nothing here depends on it.
            self.end(-number)
        elif number in self.handlers:
            self.soon(self.handlers[number])

    def hang(self) -> None:
        """Its event loop does not come to its next callback; only SIGKILL helps."""
        if self.state == "running":
            self.state = "hung"

    def end(self, code: int) -> None:
        """The process is no more; its children are killed with it."""
        if self.state == "dead":
            return
        self.state, self.code = "dead", code
        self._parked.clear()
        for child in self.children:
            child.kill(signal.SIGKILL)
        for call in self.on_exit:
            self.loop.call_soon(call, context=KERNEL)

    def _go_on(self) -> None:
        if self.state == "stopped":
            self.state = "running"
            parked, self._parked = self._parked, []
            self.loop.resume(parked)

    def __repr__(self) -> str:
        return f"{self.name}@{self.host}"


def _close(coroutine: Any) -> None:
    """End a coroutine that was killed: its ``finally`` blocks may wait for something once more."""
    for _ in range(_ROUNDS):
        with contextlib.suppress(RuntimeError):
            coroutine.close()
            return


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs what is ready; when nothing is, the clock jumps to the next timer."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._wound_up = False
        super().__init__()
        self.now = 0.0
        self.handles = 0
        """How many callbacks were run."""
        self.limit = 400_000
        """So many are more than any job takes: something goes round in a circle."""
        self.enough = False
        """Nothing that happens from here on is of interest."""
        self.processes: dict[int, Process] = {}

    def new_pid(self, process: Process) -> int:
        pid = _FIRST_PID + len(self.processes)
        self.processes[pid] = process
        return pid

    def time(self) -> float:
        return self.now

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Run what had to wait, in the order in which it was to run."""
        self._ready.extendleft(reversed(handles))

    def run_for(self, seconds: float) -> None:
        """Run for so long, by the virtual clock, or until ``enough`` is set."""
        end = self.now + seconds
        while self.now < end and not self.enough:
            if not self._ready and not self._scheduled:
                raise Stuck
            self._run_once()

    def set_exception_handler(self, handler: Any) -> None:
        """Only the simulation's own: it is to see every exception."""
        if CURRENT.get() is None:
            super().set_exception_handler(handler)

    def wind_up(self) -> None:
        """Let all tasks end, so that none is left behind half run."""
        self.set_exception_handler(lambda *_: None)
        self._wound_up = True
        for process in self.processes.values():
            process.state = "running"
        for _ in range(_ROUNDS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self._run_once()
        for task in asyncio.all_tasks(self):
            _close(task.get_coro())

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        if not ready and scheduled:
            self.now = max(self.now, scheduled[0]._when)  # type: ignore[attr-defined]
        now = self.now
        while scheduled and scheduled[0]._when <= now:  # type: ignore[attr-defined]
            ready.append(heapq.heappop(scheduled))
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)  # type: ignore[attr-defined]
            if process is None or process.state == "running":
                self.handles += 1
                handle._run()
            elif process.state != "dead":
                process.park(handle)
        if self.handles > self.limit:
            raise Stuck(f"more than {self.limit} callbacks")

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """Nobody waits in a selector."""

    def is_running(self) -> bool:
        return not self._wound_up
