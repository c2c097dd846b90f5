"""Inject a fault at a named point of a step, in one worker or in several.

A test gives faults to a whole job through the environment, and the job's script arms them before it joins:

    CRAFT_TEST_FAULTS='[{"point": "blocks_sent", "step": 5, "rank": 2}]' craft run --workers 4 train.py

    from craft import testing       # in train.py
    testing.arm()
    job = craft.join()

``craft.telemetry.fault_points`` lists the points that CRAFT reaches; a script adds its own with
``testing.reach("forward", step.number)``. A fault strikes once in a job. Before it does, it writes to the worker's standard
error, and the worker's id to the file ``struck/<index>`` of the run directory.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from craft.protocol.errors import ConfigError, InjectedError
from craft.settings.environ import FAULTS, read_faults
from craft.settings.files.private_files import open_private
from craft.settings.worker import WorkerSettings
from craft.telemetry import fault_points

_AFTER_LIMIT_S = 30.0


class PlacedFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What happens, and where: it hits the first worker that fits."""

    point: str
    """Name of the point."""
    kind: Literal["kill", "stop", "raise", "sleep", "error"] = "kill"
    """SIGKILL or SIGSTOP to this process, an InjectedError, a pause of ``seconds``, or the OSError ``errno``.

    An ``error`` is for points that are system calls: every call fails for ``seconds`` from the first one on.
    """
    step: int | None = None
    """Number of the step; None: any."""
    worker: str | None = None
    """The worker it hits; None: any."""
    rank: int | None = None
    """The rank it hits, in the worker's current generation; None: any."""
    occurrence: int = 1
    """Strike the n-th time that the point is reached in a process; points of buckets are reached several times."""
    after: str | None = None
    """Wait at the point until another thread has reached this other one in the same step, and strike then."""
    after_file: str | None = None
    """Strike only once a file of this name exists in the run directory."""
    seconds: float = 0.0
    """How long a ``sleep`` is, and how long an ``error`` lasts; an error of 0 seconds occurs once."""
    errno: str = "EMFILE"
    """Name of the error with which the system call fails, such as ENOSPC."""


def arm(faults: Sequence[PlacedFault] | None = None) -> None:
    """Place ``faults`` in this process; by default those in the environment variable ``CRAFT_TEST_FAULTS``."""
    wanted = _from_environment() if faults is None else faults
    for fault in wanted:
        if fault.errno not in errno.errorcode.values():
            raise ConfigError(f"no system call fails with {fault.errno}: errno must be a name such as EMFILE or ENOSPC")
    fault_points.listen(_Armed(wanted, WorkerSettings.from_environment()) if wanted else None)


def _from_environment() -> Sequence[PlacedFault]:
    text = read_faults()
    if text is None:
        return ()
    try:
        return msgspec.json.decode(text, type=tuple[PlacedFault, ...])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FAULTS} is not a JSON list of faults: {error}") from None


class _Armed:
    """Listens to the points of this process, on any thread."""

    def __init__(self, faults: Sequence[PlacedFault], settings: WorkerSettings) -> None:
        self._worker_id = settings.worker_id
        self._run_dir = settings.run_dir
        self._faults = faults
        self._counts = [0] * len(self._faults)
        self._awaited = frozenset(fault.after for fault in self._faults)
        self._reached: set[tuple[str, int]] = set()
        self._until: dict[int, float] = {}
        """Errors that last, by the index of their fault: until when, by the monotonic clock."""
        # Guards the three above: main, exchange and opening threads all call this.
        self._change = threading.Condition()

    def __call__(self, point: str, step: int, rank: int | None) -> None:
        if point in self._awaited:
            with self._change:
                self._reached.add((point, step))
                self._change.notify_all()
        for index, fault in enumerate(self._faults):
            if fault.point == point and time.monotonic() < self._until.get(index, 0.0):
                raise _error_of(fault)
            if fault.point == point and self._fits(fault, step, rank) and self._due(index):
                self._wait_for_other(fault, step)
                if self._claim(index):
                    self._until[index] = time.monotonic() + fault.seconds if fault.kind == "error" else 0.0
                    self._strike(fault, step)

    def _fits(self, fault: PlacedFault, step: int, rank: int | None) -> bool:
        if fault.step not in (None, step) or fault.worker not in (None, self._worker_id):
            return False
        if fault.after_file is not None and not (self._run_dir and (self._run_dir / fault.after_file).exists()):
            return False
        return fault.rank is None or fault.rank == (_current_rank() if rank is None else rank)

    def _due(self, index: int) -> bool:
        with self._change:
            self._counts[index] += 1
            return self._counts[index] == self._faults[index].occurrence

    def _wait_for_other(self, fault: PlacedFault, step: int) -> None:
        if fault.after is None:
            return
        wanted = (fault.after, step)
        with self._change:
            if not self._change.wait_for(lambda: wanted in self._reached, _AFTER_LIMIT_S):
                raise InjectedError(f"{fault.after} of step {step} was not reached while {fault.point} waited for it")

    def _claim(self, index: int) -> bool:
        """Return True in the one process of the job that the fault strikes."""
        if self._run_dir is None:
            return True
        try:
            _struck(self._run_dir).mkdir(mode=0o700, exist_ok=True)
            fd = open_private(_struck(self._run_dir) / str(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(fd, "w") as file:
                file.write(self._worker_id)
        except FileExistsError:
            return False
        return True

    def _strike(self, fault: PlacedFault, step: int) -> None:
        # Straight to the file descriptor: a killed process flushes nothing.
        os.write(2, b"craft.testing: struck by " + msgspec.json.encode(fault) + b"\n")
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "raise":
            raise InjectedError(f"injected by a test at {fault.point} of step {step}")
        elif fault.kind == "error":
            raise _error_of(fault)
        else:
            time.sleep(fault.seconds)


def _error_of(fault: PlacedFault) -> OSError:
    number: int = getattr(errno, fault.errno)
    return OSError(number, os.strerror(number))


def _current_rank() -> int | None:
    """Return this worker's rank; None before it has joined."""
    # Imported late: it loads torch, which a process that reaches a point has loaded already.
    from craft.worker.entry.worker_process import process

    return process.job.rank if process.job is not None else None


def _struck(run_dir: Path) -> Path:
    return run_dir / "struck"


def struck(run_dir: Path) -> dict[int, str]:
    """Return which faults of a job have struck, by index, with the worker that each hit."""
    return {int(file.name): file.read_text() for file in sorted(_struck(run_dir).glob("*"))}


def encode(faults: Sequence[PlacedFault]) -> dict[str, str]:
    """Return the environment variable that passes ``faults`` to a job."""
    return {FAULTS: msgspec.json.encode(faults).decode()}
