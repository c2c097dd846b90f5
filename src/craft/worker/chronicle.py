"""What a worker writes down: one line per commit and per generation, and the metrics of every step, once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from craft.protocol.entries import Entered
from craft.settings.rundir import RunDir
from craft.telemetry.record import MAX_WAITING, Record, append_to, say_once, trouble_of


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was committed just now."""

    step: int
    branch: int
    generation: int
    """Under which it was committed."""
    members: tuple[str, ...]
    """Of that generation, in the order of their ranks."""
    plan: tuple[str | None, ...]
    """Who computed which microbatch; None for one that was dropped."""
    metrics: Mapping[str, float]


class Chronicle:
    """``steps.jsonl`` and ``generations.jsonl`` of a worker and, on the leader, ``metrics.jsonl``.

    Without a run directory it writes nothing. Where that has no room, training goes on, and lines wait.
    """

    def __init__(
        self, run_dir: Path | None, worker_id: str, tell: Callable[[str], None] = lambda trouble: None
    ) -> None:
        """``tell`` is called when something cannot be written, with why, and with nothing when all can be again."""
        self._worker_id = worker_id
        self._tell = tell
        self._told = ""
        self._steps: Record | None = None
        self._generations: Record | None = None
        self._metrics: _Metrics | None = None
        if run_dir is not None:
            run = RunDir(run_dir)
            self._steps = Record(run.steps(worker_id))
            self._generations = Record(run.generations(worker_id))
            self._metrics = _Metrics(run.metrics)

    def committed(self, committed: Committed) -> None:
        """Write the line of a commit."""
        if self._steps is None or self._generations is None or self._metrics is None:
            return
        step, branch = committed.step, committed.branch
        line = {
            "step": step,
            "branch": branch,
            "time": time.time(),
            "generation": committed.generation,
            "world_size": len(committed.members),
            "microbatches": [each for each, owner in enumerate(committed.plan) if owner == self._worker_id],
            "plan": dict(enumerate(committed.plan)),
        }
        self._steps.add(msgspec.json.encode(line))
        # JSON has no NaN: a metric that is not finite is null.
        values = {"step": step, **({"branch": branch} if branch else {}), "time": line["time"], **committed.metrics}
        self._metrics.keep((branch, step), msgspec.json.encode(values))
        if committed.members[0] == self._worker_id:
            self._metrics.write()
        self._generations.flush()
        self._tell_trouble()

    def entered(self, entered: Entered) -> None:
        """Write the line of a generation; whichever thread follows generations calls it."""
        if self._generations is not None:
            self._generations.add(msgspec.json.encode(entered))

    def complete(self) -> None:
        """The job is over, and the leader may be gone: write what it did not, and what waits."""
        if self._steps is None or self._generations is None or self._metrics is None:
            return
        self._steps.flush()
        self._generations.flush()
        self._metrics.write()
        self._tell_trouble()

    def _tell_trouble(self) -> None:
        assert self._steps is not None and self._generations is not None and self._metrics is not None
        trouble = self._steps.trouble or self._generations.trouble or self._metrics.trouble
        if bool(trouble) != bool(self._told):
            self._told = trouble
            self._tell(trouble)


class _Metrics:
    """``metrics.jsonl``, which every worker keeps and the leader writes."""

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        """Why it cannot be written now; empty: it can, or this worker did not try."""
        self._path = path
        self._fd: int | None = None
        self._written = -1
        """Its size when this worker last wrote to it."""
        # What was not written by a leader that is gone is written by the next one.
        self._recent: deque[tuple[tuple[int, int], bytes]] = deque(maxlen=MAX_WAITING)

    def keep(self, place: tuple[int, int], line: bytes) -> None:
        """Keep a line that is to be written, by this worker or another; ``place`` is its (branch, step)."""
        self._recent.append((place, line))

    def write(self) -> None:
        """Write what is kept and not there yet."""
        trouble = ""
        try:
            if self._fd is None:
                self._fd = append_to(self._path)
            # A leader that is declared lost, and may still live, must not write what the next one writes; nor must two who end.
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                self._append(self._fd)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            # Whatever came of it: look at the file again before the next line.
            self._written = -1
            trouble = trouble_of(self._path, error)
        say_once(self._path, self.trouble, trouble)
        self.trouble = trouble

    def _append(self, fd: int) -> None:
        if os.fstat(fd).st_size != self._written:
            last, torn = _last_place(fd)
            if torn:
                # A full disk cut the last line short: end it, so that it does not swallow the next one.
                os.write(fd, b"\n")
                # Perhaps it lacked nothing but its end.
                last, _ = _last_place(fd)
            self._recent = deque((entry for entry in self._recent if entry[0] > last), maxlen=MAX_WAITING)
        while self._recent:
            line = self._recent[0][1] + b"\n"
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._recent.popleft()
        self._written = os.fstat(fd).st_size


def _last_place(fd: int) -> tuple[tuple[int, int], bool]:
    """(branch, step) of the last whole line of ``metrics.jsonl``, and whether something follows that."""
    size = os.fstat(fd).st_size
    begin = max(0, size - 65536)
    *whole, rest = os.pread(fd, size - begin, begin).split(b"\n")
    for line in reversed(whole):
        try:
            found = json.loads(line)
            return (int(found.get("branch", 0)), int(found["step"])), bool(rest)
        except ValueError:
            continue
    return (0, -1), bool(rest)
