"""Kill workers of sharded jobs at random moments, and compare the end with one replica alone (P1 to P3).

    python -m tests.chaos.sharded_kills --runs 40 --seed 1
    python -m tests.chaos.sharded_kills --runs 1 --seed 7 --layout fsdp-2x2 --dir kills        one of them again

A job has several kills, drawn from its seed: from outside after a random delay, at a named point of a step, or two while a
replacement joins. Before each, the job is at full strength. A line for each job; exit code 1 if one of them is not exact.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.jobs import SCRIPTS, Job, Jobs, Result, describe, wait_for

from craft.protocol.errors import Unreachable
from craft.settings.rundir import RunDir
from craft.telemetry.history import read_run
from craft.testing import Fault
from craft.testing.faults import struck
from craft.testing.history import check

from .kill_moments import POINTS_OF_JOINERS, Kill, draw_kills

SCRIPT = SCRIPTS / "train_sharded.py"
LAYOUTS = {
    "fsdp-2x2": ("fsdp", 2, 2),
    "fsdp-3x2": ("fsdp", 3, 2),
    "fsdp-2x4": ("fsdp", 2, 4),
    "tp-2x2": ("tp", 2, 2),
    "both-2x4": ("both", 2, 4),
}
"""Kind of script, replicas, workers of each; ``both`` has a mesh of 2x2."""
LIMIT_S = 120.0
_LOOK_S = 0.05
_SHOWN = 25
"""Lines of a problem that are printed."""


@dataclass
class Outcome:
    """How a job went."""

    layout: str
    seed: int
    steps: int = 0
    kills: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def row(self) -> str:
        verdict = "NOT EXACT" if self.problems else "exact"
        return f"{self.layout:9} seed {self.seed:<4} {verdict:9} {self.wall_s:5.1f} s  kills: {', '.join(self.kills)}"


class Torment:
    """One job that loses workers."""

    def __init__(
        self, jobs: Jobs, layout: str, seed: int, kills: Sequence[Kill], steps: int, more: Sequence[str] = ()
    ) -> None:
        """``more``: other options of ``craft run``."""
        kind, replicas, size = LAYOUTS[layout]
        self._kills = kills
        self._steps = steps
        self._replicas, self._workers = replicas, replicas * size
        self.outcome = Outcome(layout, seed, steps)
        self._lost: set[str] = set()
        self._pids: dict[str, int] = {}
        self.job: Job = jobs.start(
            SCRIPT, kind, "--steps", str(steps), "--slow", "0.03",
            workers=self._workers,
            options=["--workers-per-replica", str(size), *more],
            faults=list(self._faults()),
            environment={"CRAFT_MAX_RESTARTS": "50"},
        )  # fmt: skip

    def _faults(self) -> Iterator[Fault]:
        """Place a fault for each kill; it strikes once the file of its number is there."""
        for number, kill in enumerate(self._kills):
            file = f"strike{number}"
            if kill.is_at_a_point:
                rank = int(kill.pick * self._workers)
                yield Fault(point=kill.moment, rank=rank, after_file=file, occurrence=1 + int(kill.after_s))
            else:
                # A placeholder keeps the numbers of the others; it strikes only for ``joiner``.
                point = POINTS_OF_JOINERS[int(kill.pick * 97) % len(POINTS_OF_JOINERS)]
                yield Fault(point=point, after_file=file)

    def run(self, reference: Path) -> Outcome:
        """Kill, wait for the end, and compare."""
        for number, kill in enumerate(self._kills):
            if not self._is_whole():
                break
            self._strike(number, kill)
            self.outcome.kills.append(str(kill))
        result = self.job.wait(LIMIT_S)
        self.outcome.wall_s = result.wall_s
        self._judge(result, reference)
        return self.outcome

    # Waiting.

    def _status(self) -> dict[str, Any] | None:
        if not RunDir(self.job.run_dir).address.exists():
            return None
        try:
            return self.job.client.get_status()
        except Unreachable:
            return None

    def _members(self) -> list[dict[str, Any]]:
        status = self._status()
        return [] if status is None else [each for each in status["workers"] if each["state"] == "member"]

    def _is_over(self) -> bool:
        return self.job.process.poll() is not None or self.job.steps() > self._steps - 25

    def _is_whole(self) -> bool:
        """Wait for full strength, with every worker's state whole; False if the job is too near to its end."""

        def whole() -> str | None:
            if self._is_over():
                return "over"
            # Asked less often than a file is looked at: the lighthouse has other things to do.
            time.sleep(_LOOK_S)
            status = self._status()
            if status is None or not status["settled"] or status["upcoming"] is not None:
                return None
            members = {each["worker_id"] for each in status["workers"] if each["state"] == "member"}
            everyone = len(members) == self._workers and not members & self._lost
            return "whole" if everyone and self._all_compute(status["generation"]) else None

        return bool(self._wait(whole, "full strength") == "whole")

    def _all_compute(self, generation: int) -> bool:
        """Whether every replica has computed in a step of this generation: before that, a newcomer depends on its twin."""
        commits = [commit for each in read_run(self.job.run_dir).commits.values() for commit in each[-1:]]
        newest = max(commits, key=lambda commit: commit.step, default=None)
        if newest is None or newest.generation != generation:
            return False
        return len(set(newest.plan.values())) == self._replicas

    def _wait(self, condition: Any, what: str) -> Any:
        try:
            return wait_for(condition, what, LIMIT_S)
        except AssertionError as error:
            self.job._dump_stacks()
            raise AssertionError(f"{error}\n{self._status()}\nfiles: {self.job.run_dir}") from None

    # Killing.

    def _strike(self, number: int, kill: Kill) -> None:
        members = self._members()
        self._note_pids(members)
        file = self.job.run_dir / f"strike{number}"
        if kill.is_at_a_point:
            file.touch()
            self._wait_for_struck(number, f"a worker ends at {kill.moment}")
            return
        time.sleep(kill.delay_s)
        victim = members[int(kill.pick * len(members))]
        self._kill(victim)
        if kill.moment == "joiner":
            file.touch()
            self._wait_for_struck(number, "the replacement ends too")
        elif kill.moment == "meanwhile":
            # Two losses in one update can take the state of a position with them.
            reached = self.job.steps()
            self._wait(lambda: self.job.steps() > reached + 1 or self._is_over(), "the others go on")
            time.sleep(kill.after_s)
            # Of its position there may be one more worker with the state: that one has to stay.
            others = [each for each in members if each["position"] != victim["position"]]
            self._kill(others[int(kill.delay_s * 1e6) % len(others)])

    def _wait_for_struck(self, number: int, what: str) -> None:
        # The file is there a moment before the name in it.
        self._wait(lambda: struck(self.job.run_dir).get(number) or self._is_over(), what)
        if victim := struck(self.job.run_dir).get(number):
            self._lost.add(victim)

    def _kill(self, worker: dict[str, Any]) -> None:
        self._lost.add(worker["worker_id"])
        try:
            os.kill(worker["pid"], signal.SIGKILL)
        except ProcessLookupError:
            assert self.job.process.poll() is not None, f"{worker['worker_id']} was gone\nfiles: {self.job.run_dir}"

    def _note_pids(self, members: Sequence[dict[str, Any]]) -> None:
        for each in members:
            known = self._pids.setdefault(each["worker_id"], each["pid"])
            if known != each["pid"]:
                self.outcome.problems.append(f"{each['worker_id']} has another process: {known}, then {each['pid']}")
        gone = self._pids.keys() - {each["worker_id"] for each in members} - self._lost
        if gone:
            self.outcome.problems.append(f"{', '.join(sorted(gone))} ended too, and nothing was done to them")

    # Judging.

    def _judge(self, result: Result, reference: Path) -> None:
        problems = self.outcome.problems
        if result.exit_code != 0:
            problems.append(f"exit code {result.exit_code}{describe(result)}")
            return
        report = check(result.run_dir, reference)
        problems += report.violations
        if report.steps != self._steps:
            problems.append(f"{report.steps} steps instead of {self._steps}")
        faults = {w for line in result.run.journal if line.get("outcome") == "Fault" for w in line["worker_ids"]}
        if faults != self._lost:
            problems.append(f"lost were {sorted(faults)}, killed {sorted(self._lost)}")


class References:
    """One replica alone, once for each kind."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._jobs = Jobs(folder)
        self._steps = steps
        self._known: dict[tuple[str, int], Path] = {}

    def of(self, layout: str) -> Path:
        kind, _, size = LAYOUTS[layout]
        if (kind, size) not in self._known:
            options = ["--workers-per-replica", str(size)]
            result = self._jobs.run(
                SCRIPT, kind, "--steps", str(self._steps), workers=size, options=options, limit_s=3 * LIMIT_S
            )
            assert result.exit_code == 0, describe(result)
            self._known[kind, size] = result.run_dir
        return self._known[kind, size]


def run_one(
    folder: Path,
    references: References,
    layout: str,
    seed: int,
    *,
    kills: int,
    steps: int,
    checkpoints: bool = False,
) -> Outcome:
    """Run one job; its files stay if it is not exact."""
    reference = references.of(layout)
    jobs = Jobs(folder)
    store = ("--checkpoints", str(folder / "store"), "--checkpoint-every", "5 steps") if checkpoints else ()
    torment = Torment(jobs, layout, seed, draw_kills(seed, kills, checkpoints=checkpoints), steps, store)
    try:
        outcome = torment.run(reference)
    except AssertionError as error:
        outcome = torment.outcome
        outcome.problems.append(str(error))
    finally:
        jobs.end()
    if not outcome.problems:
        shutil.rmtree(folder)
    return outcome


def _first_lines(text: str) -> str:
    """Return the beginning of a problem: the rest is in the files that stay."""
    lines = text.splitlines()
    return "\n".join(["  " + line[:200] for line in lines[:_SHOWN]] + ["  ..."] * (len(lines) > _SHOWN))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.sharded_kills", description="Kill sharded workers.")
    parser.add_argument("--runs", type=int, default=5, help="how many jobs; layouts take turns")
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="only these")
    parser.add_argument("--kills", type=int, default=3, help="in each job")
    parser.add_argument("--steps", type=int, default=120, help="of each job")
    parser.add_argument("--checkpoints", action="store_true", help="write some, and kill workers while they do")
    parser.add_argument("--dir", type=Path, help="where their files go; those of exact jobs are removed")
    options = parser.parse_args(arguments)
    folder = options.dir or Path(tempfile.mkdtemp(prefix="craft-kills-"))
    references = References(folder / "references", options.steps)
    layouts = options.layout or list(LAYOUTS)
    exact = kills = 0
    for number in range(options.runs):
        seed, layout = options.seed + number, layouts[number % len(layouts)]
        outcome = run_one(
            folder / f"seed{seed}",
            references,
            layout,
            seed,
            kills=options.kills,
            steps=options.steps,
            checkpoints=options.checkpoints,
        )
        exact += not outcome.problems
        kills += len(outcome.kills)
        print("\n".join([outcome.row, *(_first_lines(each) for each in outcome.problems)]), flush=True)
    print(f"{exact} of {options.runs} jobs are exact, after {kills} kills; other processes stayed the same in those")
    return 0 if exact == options.runs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
