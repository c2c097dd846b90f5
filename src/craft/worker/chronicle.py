"""What a worker writes down: one line per commit and per generation, and the metrics of every step, once."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from craft.protocol.entries import Entered


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

    Without a run directory it writes nothing.
    """

    def __init__(self, run_dir: Path | None, worker_id: str) -> None:
        self._worker_id = worker_id
        self._steps: int | None = None
        self._generations: int | None = None
        self._metrics_path: Path | None = None
        self._metrics: int | None = None
        self._written = -1
        """Size of ``metrics.jsonl`` when this worker last wrote to it."""
        # What was not written by a leader that is gone is written by the next one.
        self._recent: deque[tuple[tuple[int, int], bytes]] = deque(maxlen=16)
        if run_dir is not None:
            folder = run_dir / "workers" / worker_id
            folder.mkdir(parents=True, exist_ok=True)
            self._steps = _append_to(folder / "steps.jsonl")
            self._generations = _append_to(folder / "generations.jsonl")
            self._metrics_path = run_dir / "metrics.jsonl"

    def committed(self, committed: Committed) -> None:
        """Write the line of a commit."""
        if self._steps is None:
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
        os.write(self._steps, msgspec.json.encode(line) + b"\n")
        # JSON has no NaN: a metric that is not finite is null.
        values = {"step": step, **({"branch": branch} if branch else {}), "time": line["time"], **committed.metrics}
        self._recent.append(((branch, step), msgspec.json.encode(values)))
        if committed.members[0] == self._worker_id:
            self._write_metrics()

    def entered(self, entered: Entered) -> None:
        """Write the line of a generation; whichever thread follows generations calls it."""
        if self._generations is not None:
            os.write(self._generations, msgspec.json.encode(entered) + b"\n")

    def complete(self) -> None:
        """The job is over, and the leader may be gone: write what it did not."""
        if self._steps is not None:
            self._write_metrics()

    def _write_metrics(self) -> None:
        if self._metrics is None:
            assert self._metrics_path is not None
            self._metrics = _append_to(self._metrics_path)
        # A leader that is declared lost, and may still live, must not write what the next one writes; nor must two who end.
        fcntl.lockf(self._metrics, fcntl.LOCK_EX)
        try:
            if os.fstat(self._metrics).st_size != self._written:
                last, torn = _last_place(self._metrics)
                if torn:
                    # A full disk cut the last line short: end it, so that it does not swallow the next one.
                    os.write(self._metrics, b"\n")
                self._recent = deque((entry for entry in self._recent if entry[0] > last), maxlen=16)
            while self._recent:
                os.write(self._metrics, self._recent.popleft()[1] + b"\n")
            self._written = os.fstat(self._metrics).st_size
        finally:
            fcntl.lockf(self._metrics, fcntl.LOCK_UN)


def _append_to(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


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
