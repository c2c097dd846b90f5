"""The keeper: a pre-imported process that forks the serving lighthouse, and forks again when it fails.

``craft lighthouse --keep`` runs ``keep``. The keeper serves no requests and has no threads. It holds the listening socket, so
that the address stays the same and the next child answers connections that arrive between two children. A child that
does not answer, or is stopped by a signal, is killed and replaced, like one that dies.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from craft.control.process import BEAT_S, end_with_parent
from craft.protocol.messages import ending

logger = logging.getLogger(__name__)

EXIT_BAD_INPUT = 2
YOUNG_S = 5.0
"""After a child that dies younger than this, the next one is delayed: it would most likely die too."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
FORK_AGAIN_S = 1.0
ANSWER_LIMIT_S = 5.0
"""A child whose event loop has not run for this long is replaced. A busy machine or a slow disk stays below it."""
STOP_LIMIT_S = 1.0
"""A child that a signal has stopped for this long is replaced, too."""
_STOPPED, _TRACED, _IN_KERNEL = "T", "t", "D"
_WATCHED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})

Serve = Callable[[socket.socket, Callable[[str], None], Callable[[], None]], int]
"""Serve on a listening socket until a signal; return the exit code.

The second argument is called once it serves, with a line for people; the third every ``BEAT_S`` from then on.
"""


def keep(serve: Serve, listener: socket.socket, say: Callable[[str], None]) -> int:
    """Fork serving children until one ends normally; return the exit code of this process."""
    return _Keeper(serve, listener, say).run()


class _Keeper:
    def __init__(self, serve: Serve, listener: socket.socket, say: Callable[[str], None]) -> None:
        self._serve = serve
        self._listener = listener
        self._say = say
        # Two bytes shared with every child: whether a child has announced its address, and a counter that the serving
        # child increments.
        self._shared = mmap.mmap(-1, 2)
        self._ending = False

    def run(self) -> int:
        # Blocked and waited for, instead of handlers: none can be missed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        delay_s = 0.0
        while True:
            began = time.monotonic()
            pid = self._fork(before)
            if pid is None:
                return 0
            status = self._see_through(pid)
            code = os.waitstatus_to_exitcode(status)
            if self._ending or code in (0, EXIT_BAD_INPUT, -signal.SIGTERM, -signal.SIGINT):
                return max(code, 0)
            if not self._shared[0]:
                # It never served: the parent waits for the address, and must hear that none will come.
                if code < 0:
                    logger.error("the lighthouse was %s before it listened", ending(code))
                return code if code > 0 else 1
            young = time.monotonic() - began < YOUNG_S
            logger.warning("the serving process ended (%s): starting another one", ending(code))
            if young and delay_s and self._told_to_end(delay_s):
                return 0
            delay_s = min(max(2 * delay_s, FIRST_DELAY_S), LONGEST_DELAY_S) if young else 0.0

    def _fork(self, mask: set[int | signal.Signals]) -> int | None:
        """Fork a serving child, retrying while the system has no process; None if this process is to end."""
        keeper = os.getpid()
        # Unflushed output would be written by both.
        sys.stdout.flush()
        sys.stderr.flush()
        said = False
        while True:
            try:
                pid = os.fork()
                break
            except OSError as error:
                if not said:
                    logger.error("cannot fork a process to serve: %s; trying again", error.strerror or error)
                said = True
            if self._told_to_end(FORK_AGAIN_S):
                return None
        if pid:
            return pid
        code = 1
        try:
            # Killed, not asked: the next lighthouse must find the lock free.
            end_with_parent(keeper, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = self._serve(self._listener, self._say_once, self._beat)
        except KeyboardInterrupt:
            code = 0
        except Exception:
            # The edge of the process.
            logger.exception("the lighthouse failed")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _say_once(self, line: str) -> None:
        if not self._shared[0]:
            self._say(line)
            self._shared[0] = 1

    def _beat(self) -> None:
        self._shared[1] = (self._shared[1] + 1) % 256

    def _see_through(self, pid: int) -> int:
        """Wait for the child's end, kill it if it does not answer, and forward signals that end this process."""
        pulse = Pulse(pid, self._shared[1])
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            caught = _next_signal(_WATCHED, BEAT_S)
            if caught is None:
                if (problem := pulse.look(self._shared[1])) is not None:
                    logger.warning("the serving process %s: killing it and starting another one", problem)
                    os.kill(pid, signal.SIGKILL)
            elif caught != signal.SIGCHLD:
                self._ending = True
                os.kill(pid, signal.SIGTERM)

    def _told_to_end(self, delay_s: float) -> bool:
        """Wait, at most until a signal comes."""
        return _next_signal(_WATCHED - {signal.SIGCHLD}, delay_s) is not None


def _next_signal(signals: frozenset[signal.Signals], limit_s: float) -> int | None:
    """Wait for one of these signals; None after the limit."""
    found = signal.sigtimedwait(signals, limit_s)
    # If this process was stopped meanwhile and continues after the limit, Python returns invalid signal numbers.
    return found.si_signo if found is not None and found.si_signo in signals else None


class Pulse:
    """Checks whether a child answers. Counts its own checks: time in which the keeper did not run does not count."""

    def __init__(self, pid: int, count: int, state_of: Callable[[int], str] | None = None) -> None:
        """``state_of`` returns the kernel's letter for a process's state; from /proc by default."""
        self._pid = pid
        self._state_of = state_of or _state_of
        self._count = count
        self._serves = False
        self._silent = 0
        self._stopped = 0

    def look(self, count: int) -> str | None:
        """Called every ``BEAT_S``, with the child's beat count; return what is wrong with it, once."""
        state = self._state_of(self._pid)
        if state == _TRACED:
            self._silent = self._stopped = 0
            return None
        # One that ran since the last check is slow, though it may be stopped right now.
        self._stopped = self._stopped + 1 if state == _STOPPED and count == self._count else 0
        if count != self._count:
            self._silent = 0
        elif state != _IN_KERNEL:
            # One that waits for a disk cannot be killed before the disk answers, and then goes on.
            self._silent += 1
        self._serves = self._serves or count != self._count
        self._count = count
        if self._stopped == round(STOP_LIMIT_S / BEAT_S):
            return f"was stopped by a signal {STOP_LIMIT_S:g} s ago"
        # Before it serves, it reads the journal, which may be long.
        if self._serves and self._silent == round(ANSWER_LIMIT_S / BEAT_S):
            return f"has not answered for {ANSWER_LIMIT_S:g} s"
        return None


def _state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1]
    except OSError:
        return ""
