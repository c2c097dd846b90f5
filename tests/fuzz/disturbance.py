"""Carry out a plan of kills in a running job: watches its files, and sends signals at the planned moments."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.integration.jobs import JOB_VARIABLE, Job

from craft.protocol.errors import CraftError
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines

from .kills import Kill, Plan

HOLD_S = 12.0
"""The job is slowed for at most so long altogether, so that others can join before its end."""
FREE = ("starting", "joined", "last")
"""Moments at which the state cannot be lost with a worker: there is none yet, or it is that of the end."""
POLL_S = 0.003


class Disturbance:
    """One job, from its start until it ends or nothing is left to do to it."""

    def __init__(self, job: Job, plan: Plan, seed: int, num_steps: int) -> None:
        """``num_steps`` is what the undisturbed run had."""
        self.done: list[str] = []
        """What was done to whom."""
        self._job = job
        self._pending = list(plan.kills)
        self._cut = plan.power_cut
        self._workers = plan.workers
        self._draw = Random(f"{seed} victims")
        self._num_steps = num_steps
        self._hold = job.files.parent / "hold"
        self._held_s = 0.0
        self._fired = bool(plan.faults)
        self._generations = 0
        self._struck: set[str] = set()
        self._stopped: tuple[str, int] | None = None
        """Worker and process that are stopped."""
        self._fired_generations = 0
        """How many generations there were at the last kill."""

    def carry_out(self, deadline: float) -> None:
        """Return when the job has ended, or at the deadline."""
        last = time.monotonic()
        while self._job.process.poll() is None and (now := time.monotonic()) < deadline:
            if self._hold.exists():
                self._held_s += now - last
            last = now
            self._look()
            time.sleep(POLL_S)
        self._hold.unlink(missing_ok=True)

    def _look(self) -> None:
        steps = self._count(RunDir(self._job.run_dir).metrics)
        if self._cut is not None and steps >= self._cut and not self._pending:
            self._end_everything()
        elif self._pending and self._due(self._pending[0], steps):
            self._strike(self._pending[0])
        self._continue_awaited()
        self._keep_slow()

    def _keep_slow(self) -> None:
        """Hold the job while something is to come before its end, or while it is not whole again."""
        coming = any(kill.moment != "last" for kill in self._pending)
        wanted = self._held_s < HOLD_S and (coming or (self._fired and not self._whole()))
        if wanted != self._hold.exists():
            self._hold.touch() if wanted else self._hold.unlink()

    def _whole(self) -> bool:
        """Whether every slot has a worker that has committed steps."""
        return (
            sum(1 for worker in self._status() if worker["state"] == "member" and worker["step"] > 0) >= self._workers
        )

    def _due(self, kill: Kill, steps: int) -> bool:
        if kill.moment == "step":
            return steps >= kill.step
        if kill.moment == "last":
            return steps >= self._num_steps
        if kill.moment == "starting":
            return any(worker["pid"] for worker in self._status())
        if kill.moment == "joining":
            return any(self._joining(worker) for worker in self._status())
        journal = list(read_lines(RunDir(self._job.run_dir).journal))
        if kill.moment == "joined":
            return any(line.get("event") == "WorkerJoined" for line in journal)
        self._generations = sum(1 for line in journal if line.get("action") in ("Reconfigure", "Propose"))
        return self._generations > self._fired_generations

    def _strike(self, kill: Kill) -> None:
        time.sleep(kill.delay_s)
        victim = self._choose(kill)
        if victim is not None and kill.moment not in FREE and self._holds_alone(victim):
            if self._held_s < HOLD_S:
                return  # Until another worker has the state, too.
            self._pending.pop(0)
            self.done.append(f"{kill}: left out, since {victim['worker_id']} alone has the state")
            return
        self._pending.pop(0)
        if victim is None:
            self.done.append(f"{kill}: no worker was there")
            return
        try:
            os.kill(victim["pid"], signal.SIGSTOP if kill.stop else signal.SIGKILL)
        except ProcessLookupError:
            self.done.append(f"{kill}: {victim['worker_id']} had ended")
            return
        self.done.append(f"{kill}: {victim['worker_id']}")
        if kill.stop:
            self._stopped = (victim["worker_id"], victim["pid"])
        self._fired = True
        self._struck.add(victim["worker_id"])
        self._fired_generations = self._generations

    def _continue_awaited(self) -> None:
        """Let a stopped worker go on if the job waits for it: others were lost meanwhile, and it has the last copy."""
        if self._stopped is None:
            return
        worker, pid = self._stopped
        if any(line.get("action") == "Await" for line in read_lines(RunDir(self._job.run_dir).journal)):
            self._stopped = None
            self.done.append(f"{worker} goes on")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _choose(self, kill: Kill) -> dict[str, Any] | None:
        living = [worker for worker in self._status() if worker["pid"] and self._is_ours(worker["pid"])]
        if kill.who == "joiner":
            living = [worker for worker in living if self._joining(worker)]
        elif kill.who != "any":
            ranked = sorted(
                (worker for worker in living if worker["rank"] is not None), key=lambda worker: worker["rank"]
            )
            living = (ranked[:1] if kill.who == "leader" else ranked[-1:]) or living
        return self._draw.choice(living) if living else None

    def _holds_alone(self, victim: dict[str, Any]) -> bool:
        """Whether the state would be lost with a worker. Before the first step every worker has it."""
        holders = {
            worker["worker_id"] for worker in self._status() if worker["state"] == "member" and worker["step"] > 0
        }
        return holders == {victim["worker_id"]}

    def _joining(self, worker: dict[str, Any]) -> bool:
        return (
            self._fired
            and bool(worker["pid"])
            and worker["state"] in ("starting", "waiting", "member")
            and not worker["step"]
        )

    def _is_ours(self, pid: int) -> bool:
        try:
            return f"{JOB_VARIABLE}={self._job.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def _end_everything(self) -> None:
        """Kill all processes of the job, as a power cut does."""
        step, self._cut = self._cut, None
        if any(line.get("action") == "Stop" for line in self._job.journal()):
            # The job has come to its end, perhaps because its script stopped it: there is nothing to resume.
            return
        self.done.append(f"power cut at step {step}")
        self._job.end()

    def _status(self) -> list[dict[str, Any]]:
        try:
            return [worker for worker in self._job.client.get_status()["workers"] if worker["state"] != "lost"]
        except (CraftError, OSError):
            return []

    @staticmethod
    def _count(file: Path) -> int:
        return sum(1 for _ in read_lines(file))
