"""The keeper: a process with everything imported that forks the serving lighthouse, and forks again when that one dies.

``craft lighthouse --keep`` runs ``keep``. The keeper serves nobody and has no threads. It holds the listening socket, so
that the address stays the same and whoever connects between two children is answered by the next one.
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

from craft.control.process import end_with_parent
from craft.protocol.messages import ending

logger = logging.getLogger(__name__)

EXIT_BAD_INPUT = 2
YOUNG_S = 5.0
"""A child that dies younger than this makes the next one wait: it would most likely die of the same."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
_WATCHED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})

Serve = Callable[[socket.socket, Callable[[str], None]], int]
"""Serves on a listening socket until told to end, calls its second argument once it does; returns the exit code."""


def keep(serve: Serve, listener: socket.socket, say: Callable[[str], None]) -> int:
    """Have children serve until one of them ends by itself; returns the exit code of this process."""
    return _Keeper(serve, listener, say).run()


class _Keeper:
    def __init__(self, serve: Serve, listener: socket.socket, say: Callable[[str], None]) -> None:
        self._serve = serve
        self._listener = listener
        self._say = say
        # One byte that every child shares with this process: whether one of them has said where it listens.
        self._said = mmap.mmap(-1, 1)
        self._ending = False

    def run(self) -> int:
        # Blocked and waited for by name, instead of handlers: there is no moment at which one could be missed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        delay_s = 0.0
        while True:
            began = time.monotonic()
            status = self._see_through(self._fork(before))
            code = os.waitstatus_to_exitcode(status)
            if self._ending or code in (0, EXIT_BAD_INPUT, -signal.SIGTERM, -signal.SIGINT):
                return max(code, 0)
            if not self._said[0]:
                # It never came to serve: whoever started us waits for a word, and must hear that none will come.
                if code < 0:
                    logger.error("the lighthouse was %s before it listened", ending(code))
                return code if code > 0 else 1
            young = time.monotonic() - began < YOUNG_S
            logger.warning("the serving process ended (%s): starting another one", ending(code))
            if young and delay_s and self._told_to_end(delay_s):
                return 0
            delay_s = min(max(2 * delay_s, FIRST_DELAY_S), LONGEST_DELAY_S) if young else 0.0

    def _fork(self, mask: set[int | signal.Signals]) -> int:
        keeper = os.getpid()
        # What is still unwritten would be written by both.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            # Killed, not asked: whoever starts the next lighthouse must not find this one still holding the lock.
            end_with_parent(keeper, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = self._serve(self._listener, self._say_once)
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
        if not self._said[0]:
            self._say(line)
            self._said[0] = 1

    def _see_through(self, pid: int) -> int:
        """Wait for the child's end, and pass on what ends this process."""
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            if signal.sigwaitinfo(_WATCHED).si_signo != signal.SIGCHLD:
                self._ending = True
                os.kill(pid, signal.SIGTERM)

    def _told_to_end(self, delay_s: float) -> bool:
        """Wait, but not for longer than until a signal comes."""
        return signal.sigtimedwait(_WATCHED - {signal.SIGCHLD}, delay_s) is not None
