"""Write a worker's lines per commit and per generation, and the metrics of every step once, on a background thread."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

# By name, in all that a step runs: scripts and their tests replace ``time.monotonic`` by clocks that move with each call.
from time import monotonic

import msgspec
from msgspec.structs import replace

from craft.protocol.events import Recovered
from craft.protocol.generation_log import Entered
from craft.protocol.membership import Slot
from craft.settings.rundir import RunDir
from craft.telemetry.records import metric_lines
from craft.telemetry.records.background_writer import PATIENCE_S, BackgroundWriter
from craft.telemetry.records.jsonl_file import MAX_WAITING, JsonlFile, append_to, log_change, trouble_of
from craft.worker.report.recovery_cost import RecoveryCosts

_STALLED_S = 5.0
"""A disk that has accepted nothing for this long is reported like one that fails."""
_LAST_WRITE_S = 10.0
"""How long a finished job waits for a slow disk."""
_SMOOTHING = 0.1


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step."""

    step: int
    branch: int
    generation: int
    """The generation that committed it."""
    members: tuple[str, ...]
    """Members of that generation, in the order of their ranks."""
    plan: tuple[str | None, ...]
    """The worker that computed each microbatch, of a replica the one at position 0; None for one that was dropped."""
    metrics: Mapping[str, float]
    slot: Slot | None = None
    """This worker's replica and position, where the model is sharded."""
    mates: tuple[str, ...] = ()
    """The workers of its replica in the order of positions, where the model is sharded."""

    @property
    def of_replica(self) -> dict[str, object]:
        """What the line of a commit has besides, where the model is sharded."""
        if self.slot is None:
            return {}
        return {"replica": self.slot.replica, "position": self.slot.position, "mates": self.mates}


class StepLog:
    """``steps.jsonl`` and ``generations.jsonl`` of a worker and, on the leader, ``metrics.jsonl``.

    Without a run directory it writes nothing. If its disk is full or slow, training continues, and lines wait.
    """

    def __init__(
        self, run_dir: Path | None, worker_id: str, unwritten: Callable[[str], None] = lambda trouble: None
    ) -> None:
        """``unwritten`` is called with the reason when a file cannot be written, and with "" when all can be again."""
        self._worker_id = worker_id
        self._unwritten = unwritten
        self._reported = ""
        self._files = _Files(RunDir(run_dir), worker_id) if run_dir is not None else None
        self._writer = BackgroundWriter("craft-records", MAX_WAITING)

    def committed(self, committed: Committed) -> None:
        """Write the line of a commit."""
        if self._files is None:
            return
        step, branch = committed.step, committed.branch
        # All workers of a replica compute its microbatches; the plan names the first of them.
        own = committed.mates[0] if committed.mates else self._worker_id
        line = {
            "step": step,
            "branch": branch,
            "time": time.time(),
            "generation": committed.generation,
            "world_size": len(committed.members),
            "microbatches": [each for each, owner in enumerate(committed.plan) if owner == own],
            "plan": dict(enumerate(committed.plan)),
            **committed.of_replica,
        }
        values = {"step": step, **({"branch": branch} if branch else {}), "time": line["time"], **committed.metrics}
        self._files.metrics.add((branch, step), metric_lines.encode(values))
        leads = committed.members[0] == self._worker_id
        self._writer.submit(functools.partial(self._files.write, msgspec.json.encode(line), leads=leads))
        self._report_trouble()

    def entered(self, entered: Entered) -> None:
        """Write the line of a generation; called by the thread that follows generations."""
        if self._files is not None:
            self._writer.submit(functools.partial(self._files.enter, entered))
            # The line says where the log ends now: a new leader's output is shown from there.
            self.flush()

    def flush(self) -> None:
        """Wait for the lines written so far, up to a moment: the loop is left."""
        self._writer.wait(PATIENCE_S)

    def complete(self) -> None:
        """Write what waits at the end of the job, and what a lost leader did not write."""
        if self._files is None:
            return
        self._writer.submit(self._files.complete)
        self._writer.wait(_LAST_WRITE_S)
        self._report_trouble()

    def _report_trouble(self) -> None:
        assert self._files is not None
        trouble = self._files.trouble
        if not trouble and self._writer.behind_s() > _STALLED_S:
            trouble = f"{self._files.folder} cannot be written: its disk has taken nothing for {_STALLED_S:g} s"
        if bool(trouble) != bool(self._reported):
            self._reported = trouble
            self._unwritten(trouble)


class StepAccount(StepLog):
    """Records also the duration of each step, and the cost of losses.

    Belongs to the main thread, except ``entered``, which the thread that follows generations calls.
    """

    def __init__(
        self,
        run_dir: Path | None,
        worker_id: str,
        note: Callable[[Recovered], None],
        samples: Callable[[int, int], int | None],
        unwritten: Callable[[str], None],
    ) -> None:
        """``samples(step, microbatch)``: the samples of a microbatch, None if unknown."""
        super().__init__(run_dir, worker_id, unwritten)
        self.step_s = 0.0
        """Seconds from commit to commit, smoothed."""
        self._recovery_costs = RecoveryCosts(worker_id, note, samples)
        self._last_commit: float | None = None

    def begin(self) -> None:
        """Mark the begin of the first step."""
        self._last_commit = monotonic()

    def settled(self, entered: Entered) -> None:
        """Record that the members of a generation have agreed on how to continue."""
        self._recovery_costs.settled(entered)

    def committed(self, committed: Committed) -> None:
        """Record a step that was committed just now."""
        super().committed(committed)
        # Monotonic: the wall clock may be set meanwhile.
        now = monotonic()
        if self._last_commit is not None:
            elapsed = now - self._last_commit
            self._recovery_costs.committed(committed.step, committed.generation, elapsed, time.time())
            self.step_s = elapsed if not self.step_s else self.step_s + _SMOOTHING * (elapsed - self.step_s)
        self._last_commit = now


class _Files:
    """The files of the background thread. The main thread reads ``trouble`` and hands over metrics."""

    def __init__(self, run: RunDir, worker_id: str) -> None:
        self.folder = run.path
        self._log = run.log(worker_id)
        self._steps = JsonlFile(run.steps(worker_id))
        self._generations = JsonlFile(run.generations(worker_id))
        self.metrics = _Metrics(run.metrics)

    @property
    def trouble(self) -> str:
        """Why a file cannot be written now; empty: all can."""
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
    """``metrics.jsonl``: every worker buffers its lines, the leader writes them."""

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        """Why it cannot be written now; empty: it can, or this worker did not try."""
        self._path = path
        self._fd: int | None = None
        self._written = -1
        """Its size when this worker last wrote to it."""
        # The next leader writes what a lost one did not. One thread adds at the end, another takes from the beginning.
        self._recent: deque[tuple[tuple[int, int], bytes]] = deque(maxlen=MAX_WAITING)

    def add(self, branch_step: tuple[int, int], line: bytes) -> None:
        """Buffer a line until this worker or another has written it."""
        self._recent.append((branch_step, line))

    def write(self) -> None:
        """Write the buffered lines that the file lacks."""
        trouble = ""
        try:
            if self._fd is None:
                self._fd = append_to(self._path)
            # A leader that was declared lost may still run: it must not write what the next one writes.
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                self._append(self._fd)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            # Read the file again before the next line.
            self._written = -1
            trouble = trouble_of(self._path, error)
        log_change(self._path, self.trouble, trouble)
        self.trouble = trouble

    def _append(self, fd: int) -> None:
        if os.fstat(fd).st_size != self._written:
            last, torn = _last_line(fd)
            if torn:
                # A full disk cut the last line short: end it, so that the next one stays separate.
                os.write(fd, b"\n")
                # It may have lacked only its newline.
                last, _ = _last_line(fd)
            while self._recent and self._recent[0][0] <= last:
                self._recent.popleft()
        while self._recent:
            entry = self._recent[0]
            line = entry[1] + b"\n"
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # If too many wait, the deque may have dropped it meanwhile.
            if self._recent[0] is entry:
                self._recent.popleft()
        self._written = os.fstat(fd).st_size


def _last_line(fd: int) -> tuple[tuple[int, int], bool]:
    """Return (branch, step) of the last complete line of ``metrics.jsonl``, and whether an incomplete one follows."""
    size = os.fstat(fd).st_size
    begin = max(0, size - 65536)
    *whole, rest = os.pread(fd, size - begin, begin).split(b"\n")
    found = [values for values in metric_lines.decoded(whole) if values is not None]
    return (found[-1].get("branch", 0), found[-1]["step"]) if found else (0, -1), bool(rest)
