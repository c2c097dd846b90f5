"""A job on a GPU that loses workers, each replaced before the next one is lost; and what the journals say of it.

``bench/gpu.py`` has the parts that are made of this.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.commits import Commit, recovery_of, step_time
from bench.jobs import CraftJob, JobFailed

WORKERS = 3
LIMIT_S = 60.0
SHAPES = {"tiny": ["--length", "64"], "small": ["--length", "256"], "1b": ["--length", "512"]}


class Disturbed:
    """A job that is told to stop in the end."""

    def __init__(self, size: str, folder: Path, options: list[str]) -> None:
        self._stop = folder / "stop"
        self._run = folder / "job" / "run"
        arguments = ["--size", size, *SHAPES[size], "--stop", str(self._stop)]
        self.job = CraftJob(folder / "job", "gpu_job.py", arguments, WORKERS, [*options, "--max-restarts", "1000"])
        self._random = random.Random(0)

    def _wait(self, there: Callable[[], Any], what: str, look_s: float = 0.02) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not (found := there()):
            if not self.job.running or time.monotonic() > deadline:
                raise JobFailed(f"{what} did not come about\n{self.job.log_tail()}")
            time.sleep(look_s)
        return found

    def settle(self, commits: int) -> set[str]:
        """Wait until all workers have so many commits in a row for which each computed something; return who they are."""
        return set(self._wait(lambda: self._settled(commits), f"{commits} undisturbed commits of {WORKERS} workers"))

    def _settled(self, commits: int) -> set[str] | None:
        rows = {name: found for name, found in self.job.commits().items() if found}
        newest = max((each[-1].generation for each in rows.values()), default=0)
        # The dead do not count: their last commits look as steady as any.
        living = {name: each[-commits:] for name, each in rows.items() if each[-1].generation == newest}
        whole = {
            name
            for name, each in living.items()
            if len(each) == commits and all(row.computed and row.generation == newest for row in each)
        }
        return whole if len(whole) == WORKERS else None

    def settle_more(self, commits: int) -> None:
        """Wait for so many commits from now on."""
        before = max(len(rows) for rows in self.job.commits().values())
        self._wait(
            lambda: max(len(rows) for rows in self.job.commits().values()) >= before + commits, f"{commits} commits"
        )

    def lose(self, number: signal.Signals, commits: int) -> dict[str, Any]:
        """Lose one worker at a random moment of a step; return what that cost the others, and how the next one came."""
        names = self.settle(commits)
        pids = {worker["worker_id"]: worker["pid"] for worker in self._status()["workers"]}
        victim = self._random.choice(sorted(names))
        longest = max((self.job.commits()[name] for name in names), key=len)
        time.sleep(self._random.uniform(0.0, step_time(longest)))
        struck = time.time()
        os.kill(pids[victim], number)
        survivors = names - {victim}
        cost = self._wait(
            lambda: recovery_of(struck, {name: self.job.commits()[name] for name in survivors}),
            f"a commit of those who are left without {victim}",
        )
        (joiner,) = self.settle(1) - survivors
        return {
            "signal": number.name,
            "recovery_s": cost.recovery_s,
            "step_s": cost.step_s,
            "survivors_slowest_s": self._slowest(survivors, struck + cost.recovery_s, joiner),
            **self._joined(joiner),
        }

    def _slowest(self, survivors: set[str], since: float, joiner: str) -> float:
        """The survivors' slowest step from their first commit after the loss until the joiner has computed something."""
        until = next(row.time_s for row in self.job.commits()[joiner] if row.computed)
        worst = 0.0
        for name in survivors:
            rows = [row.time_s for row in self.job.commits()[name] if since <= row.time_s <= until + 0.1]
            worst = max([worst, *(later - earlier for earlier, later in pairwise(rows))])
        return worst

    def _joined(self, joiner: str) -> dict[str, float]:
        """When what happened on a joiner's way, in seconds from the start of its process."""
        pid = next(worker["pid"] for worker in self._status()["workers"] if worker["worker_id"] == joiner)
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = float(Path("/proc/uptime").read_text().split()[0])
        started = time.time() - boot + ticks / os.sysconf("SC_CLK_TCK")
        log = (self._run / "workers" / joiner / "log").read_text()
        marks = {"steps_s": "trains on", "fetched_s": "fetched ", "state_s": "took the state", "level_s": "keeps pace"}
        entry, commits = self.job.entries(joiner)[-1], self.job.commits()[joiner]
        found = {name: _told(log, words) - started for name, words in marks.items()}
        found |= {f"{name}_s": entry[name] - started for name in ("told", "met", "entered")}
        fetched = re.search(r"fetched \d+ bytes .* in ([\d.]+) s", log)
        return {
            **found,
            "settled_s": entry["time"] - started,
            "fetch_s": float(fetched.group(1)) if fetched is not None else math.nan,
            "first_commit_s": commits[0].time_s - started,
            "computed_s": next(row.time_s for row in commits if row.computed) - started,
        }

    def checkpoint(self) -> dict[str, Any]:
        """Have a checkpoint taken; return what the journal says of it once it is complete."""
        before = len(self._written())
        self._ask("POST", "/v1/actions", {"action": "checkpoint", "reason": "a benchmark"})
        found: list[dict[str, Any]] = self._wait(lambda: self._written()[before:], "a checkpoint")
        return found[0]

    def _written(self) -> list[dict[str, Any]]:
        return [line for line in self.job.journal() if line.get("event") == "CheckpointWritten"]

    def _status(self) -> dict[str, Any]:
        return self._ask("GET", "/v1/status")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        place = urlsplit(self.job.address)
        headers = {"Authorization": f"Bearer {self.job.token}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        found: dict[str, Any] = json.loads(response.read())
        connection.close()
        if response.status >= 300:
            raise JobFailed(f"{path} was answered with {response.status}: {found}")
        return found

    def end(self) -> dict[str, Any]:
        """Stop; return how many steps there were, and the digest of the last state."""
        self._stop.touch()
        self.job.wait(60)
        steps, digest = finished(self.job)
        return {"steps": steps, "digest": digest}


def _told(log: str, words: str) -> float:
    """When a worker first wrote a line with these words into its log."""
    line = next((line for line in log.splitlines() if words in line), None)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() if line is not None else math.nan


def finished(job: CraftJob) -> tuple[int, str]:
    """How many steps a job committed, and the digest that all its workers ended with."""
    digests = {line["digest"] for line in job.journal() if line.get("event") == "WorkerFinished"}
    assert len(digests) == 1, digests
    return max(row.step for rows in job.commits().values() for row in rows) + 1, digests.pop()


def snapshot_steps(commits: list[Commit], taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of steps during which a snapshot was copied, hashed or written, and of the others."""
    times: dict[str, list[float]] = {"copied": [], "written": [], "without": []}
    for earlier, later in pairwise(commits):
        # Some milliseconds may lie between the commit of a step and the copy at the boundary after it.
        spans = [(each["time"] - each["seconds"], each["time"]) for each in taken]
        if any(earlier.time_s < begin < later.time_s for begin, _ in spans):
            kind = "copied"
        elif any(begin < later.time_s and end > earlier.time_s for begin, end in spans):
            kind = "written"
        else:
            kind = "without"
        times[kind].append(later.time_s - earlier.time_s)
    middle = {f"median_{kind}": statistics.median(found) for kind, found in times.items() if found}
    both = times["copied"] + times["written"]
    return {**times, **middle, "seconds": [each["seconds"] for each in taken], "median_with": statistics.median(both)}
