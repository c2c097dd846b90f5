"""What a worker writes down: one line per commit and per generation, and the metrics of every step, once.

Steps hand lines over, and a thread writes them: no step takes as long as a slow disk.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from craft.protocol.generation_log import Entered
from craft.settings.rundir import RunDir
from craft.telemetry.records import metric_lines
from craft.telemetry.records.background_writer import BackgroundWriter
from craft.telemetry.records.jsonl_file import MAX_WAITING, JsonlFile, append_to, log_change, trouble_of

_STALLED_S = 5.0
"""A disk that has taken nothing for so long is told of, as one that fails is."""
_LAST_S = 10.0
"""So long a job that is over waits for a slow disk."""


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


class StepLog:
    """``steps.jsonl`` and ``generations.jsonl`` of a worker and, on the leader, ``metrics.jsonl``.

    Without a run directory it writes nothing. Where that has no room or is slow, training goes on, and lines wait.
    """

    def __init__(
        self, run_dir: Path | None, worker_id: str, tell: Callable[[str], None] = lambda trouble: None
    ) -> None:
        """``tell`` is called when something cannot be written, with why, and with nothing when all can be again."""
        self._worker_id = worker_id
        self._tell = tell
        self._told = ""
        self._files = _Files(RunDir(run_dir), worker_id) if run_dir is not None else None
        self._writer = BackgroundWriter("craft-records", MAX_WAITING)

    def committed(self, committed: Committed) -> None:
        """Write the line of a commit."""
        if self._files is None:
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
        values = {"step": step, **({"branch": branch} if branch else {}), "time": line["time"], **committed.metrics}
        self._files.metrics.keep((branch, step), metric_lines.encode(values))
        leads = committed.members[0] == self._worker_id
        self._writer.submit(functools.partial(self._files.write, msgspec.json.encode(line), leads=leads))
        self._tell_trouble()

    def entered(self, entered: Entered) -> None:
        """Write the line of a generation; whichever thread follows generations calls it."""
        if self._files is not None:
            self._writer.submit(functools.partial(self._files.enter, entered))

    def complete(self) -> None:
        """The job is over, and the leader may be gone: write what it did not, and what waits."""
        if self._files is None:
            return
        self._writer.submit(self._files.complete)
        self._writer.wait(_LAST_S)
        self._tell_trouble()

    def _tell_trouble(self) -> None:
        assert self._files is not None
        trouble = self._files.trouble
        if not trouble and self._writer.behind_s() > _STALLED_S:
            trouble = f"{self._files.folder} cannot be written: its disk has taken nothing for {_STALLED_S:g} s"
        if bool(trouble) != bool(self._told):
            self._told = trouble
            self._tell(trouble)


class _Files:
    """What the thread writes to. The others look at ``trouble``, and hand over metrics."""

    def __init__(self, run: RunDir, worker_id: str) -> None:
        self.folder = run.path
        self._log = run.log(worker_id)
        self._steps = JsonlFile(run.steps(worker_id))
        self._generations = JsonlFile(run.generations(worker_id))
        self.metrics = _Metrics(run.metrics)

    @property
    def trouble(self) -> str:
        """Why one of them cannot be written now; empty: all can."""
        return self._steps.trouble or self._generations.trouble or self.metrics.trouble

    def write(self, step: bytes, *, leads: bool) -> None:
        self._steps.add(step)
        if leads:
            self.metrics.write()
        self._generations.flush()

    def enter(self, entered: Entered) -> None:
        self._generations.add(msgspec.json.encode(replace(entered, log_bytes=_size(self._log))))

    def complete(self) -> None:
        self._steps.flush()
        self._generations.flush()
        self.metrics.write()


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path is not None else 0
    except OSError:
        return 0


class _Metrics:
    """``metrics.jsonl``, which every worker keeps and the leader writes."""

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        """Why it cannot be written now; empty: it can, or this worker did not try."""
        self._path = path
        self._fd: int | None = None
        self._written = -1
        """Its size when this worker last wrote to it."""
        # What was not written by a leader that is gone is written by the next one. One thread adds at the end, and another
        # takes from the beginning.
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
        log_change(self._path, self.trouble, trouble)
        self.trouble = trouble

    def _append(self, fd: int) -> None:
        if os.fstat(fd).st_size != self._written:
            last, torn = _last_place(fd)
            if torn:
                # A full disk cut the last line short: end it, so that it does not swallow the next one.
                os.write(fd, b"\n")
                # Perhaps it lacked nothing but its end.
                last, _ = _last_place(fd)
            while self._recent and self._recent[0][0] <= last:
                self._recent.popleft()
        while self._recent:
            entry = self._recent[0]
            line = entry[1] + b"\n"
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Where too many wait, it may have been left out meanwhile.
            if self._recent[0] is entry:
                self._recent.popleft()
        self._written = os.fstat(fd).st_size


def _last_place(fd: int) -> tuple[tuple[int, int], bool]:
    """(branch, step) of the last whole line of ``metrics.jsonl``, and whether something follows that."""
    size = os.fstat(fd).st_size
    begin = max(0, size - 65536)
    *whole, rest = os.pread(fd, size - begin, begin).split(b"\n")
    found = [values for values in metric_lines.decoded(whole) if values is not None]
    return (found[-1].get("branch", 0), found[-1]["step"]) if found else (0, -1), bool(rest)
