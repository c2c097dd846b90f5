"""Measures what a slow worker costs: how soon it is found, how much of the loss comes back, and who is blamed in vain.

4 workers, 16 microbatches. One worker becomes three times as slow, in one of two ways: by *pulses* of SIGSTOP and SIGCONT it gets
so little processor time that it is; or its *device*, for which each microbatch waits, takes three times as long. Two jobs
take turns: in one a slow worker is only told of, in the other its microbatches move to the others. One more runs undisturbed
beside other programs that come and go. Example, a quick try:

    python bench/stragglers.py --trials 1 --noisy-steps 500
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.conduct import conduct
from bench.jobs import BENCH, CraftJob, JobFailed, Member
from bench.recovery import wait_steady, wait_until
from bench.stragglers_craft import TIMES_AS_SLOW

from craft.decide.detect.stragglers import EVEN, StragglerSettings, observed
from craft.testing.cpu_throttle import CpuThrottle

WORKERS = 4
MICROBATCHES = 16
USUAL_STEPS = 60
"""Committed before the slowness begins; the first third is left out."""
SLOW_STEPS = 70
"""Committed while it lasts; what came before it is found counts as its cost, and not as recovered."""
LAST_STEPS = 10
PERIOD_S = 0.012
"""Of being stopped and running in turns: short beside a step, since who is stopped cannot exchange either."""
MORE_THAN_A_THIRD = 1.35
"""Of a third of what it has: with that alone it is four times as slow, as tried on 2 cores."""
LIMIT_S = 120.0

NOISE = """
import random, sys, time
dice = random.Random(int(sys.argv[1]))
while True:
    until = time.monotonic() + dice.expovariate(1 / 0.3)
    while time.monotonic() < until:
        pass
    time.sleep(dice.expovariate(1 / 0.4))
"""
"""Keeps a core busy for moments of a third of a second on average, and leaves it alone for slightly longer ones."""


SAMPLES = {"pulses": 128, "device": 4}
WAIT_MS = {"pulses": 0.0, "device": 20.0}
"""Where the processor has little to do, as beside a real device, cores are not what workers lack."""


def job_of(folder: Path, answer: str, samples: int, wait_ms: float, steps: int) -> CraftJob:
    script = ["--samples", str(samples), "--microbatches", str(MICROBATCHES), "--steps", str(steps)]
    script += ["--wait-ms", str(wait_ms), "--slow", str(folder)]
    return CraftJob(folder, "stragglers_craft.py", script, WORKERS, ["--on-straggler", answer])


@contextlib.contextmanager
def slowed(way: str, folder: Path, member: Member) -> Iterator[None]:
    if way == "pulses":
        with pulses(member.pid):
            yield
    else:
        (folder / member.name).touch()
        yield
        (folder / member.name).unlink()


def pulses(pid: int) -> CpuThrottle:
    """Leave a worker so little of a core, or of its part of one where there are fewer than workers, that it is that slow."""
    running_s = PERIOD_S * min(1.0, len(os.sched_getaffinity(0)) / WORKERS) * MORE_THAN_A_THIRD / TIMES_AS_SLOW
    return CpuThrottle(pid, PERIOD_S - running_s, running_s)


def microbatch_s(job: CraftJob, victim: str) -> float:
    """How long a microbatch takes there now."""
    return float(next(each["microbatch_s"] for each in job.status()["workers"] if each["worker_id"] == victim))


def times_of(folder: Path) -> list[float]:
    """When each step was committed, by the one that writes the metrics."""
    complete, _, _ = (folder / "run" / "metrics.jsonl").read_text().rpartition("\n")
    return [json.loads(line)["time"] for line in complete.splitlines()]


def mean_step(times: list[float], begin: int, end: int) -> float:
    """Seconds per step from the commit of step ``begin`` to that of step ``end``."""
    return (times[end] - times[begin]) / (end - begin)


def measure(folder: Path, way: str, answer: str, victim: int) -> dict[str, Any]:
    """One job: undisturbed, then with a slow worker, then to its end."""
    steps = USUAL_STEPS + SLOW_STEPS + LAST_STEPS
    with job_of(folder, answer, SAMPLES[way], WAIT_MS[way], steps) as job:
        assert isinstance(job, CraftJob)
        wait_steady(job, None, WORKERS, USUAL_STEPS)
        member = job.members()[victim]
        before_s = microbatch_s(job, member.name)
        began = len(times_of(folder))
        with slowed(way, folder, member):
            wait_until(job, lambda: len(times_of(folder)) >= began + SLOW_STEPS, "steps with a slow worker", LIMIT_S)
            ended = len(times_of(folder))
        job.wait(LIMIT_S)
        journal, times = job.journal(), times_of(folder)
    found = [line for line in journal if line.get("event") == "StragglerFound"]
    right = [line for line in found if line["worker_id"] == f"w{victim}"]
    if not right or len(right) != len(found):
        raise JobFailed(f"w{victim} was slow, and found were {[line['worker_id'] for line in found]}")
    after = right[0]["step"] + 2
    digests = {line["digest"] for line in journal if line.get("event") == "WorkerFinished"}
    return {
        "way": way,
        "answer": answer,
        "victim": victim,
        "found_after": right[0]["step"] + 1 - began,
        "ratio": right[0]["ratio"],
        "slowed": right[0]["own_ms"] / 1e3 / before_s,
        "usual_s": mean_step(times, USUAL_STEPS // 3, began - 1),
        "slow_s": mean_step(times, after, ended - 1),
        "digests": sorted(digests),
    }


@contextlib.contextmanager
def noise(number: int) -> Iterator[None]:
    """Other programs that come and go."""
    started = [subprocess.Popen([sys.executable, "-c", NOISE, str(seed)]) for seed in range(number)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure_alarms(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One job in which nobody is slow, beside other programs."""
    with noise(args.noise), job_of(folder, "rebalance", args.noisy_samples, 0.0, args.noisy_steps) as job:
        assert isinstance(job, CraftJob)
        job.wait(args.noisy_steps * 0.5 + LIMIT_S)
        journal, times = job.journal(), times_of(folder)
    found = [line for line in journal if line.get("event") == "StragglerFound"]
    steps_ms = sorted(1e3 * (after - before) for before, after in pairwise(times))
    return {
        "steps": len(times),
        "alarms": [{key: line[key] for key in ("worker_id", "step", "ratio", "own_ms", "steps")} for line in found],
        "step_ms": statistics.median(steps_ms),
        "step_ms_99": steps_ms[int(0.99 * len(steps_ms))],
    }


def measure_cost(num_ranks: int, rounds: int = 2000) -> dict[str, float]:
    """What it takes to judge one step, in microseconds: usually, and while somebody is slow."""
    usual = [10_000 + rank % 7 for rank in range(num_ranks)]
    slow = [*usual[:-1], 30_000]
    answer = {}
    for name, step in (("usual", usual), ("slow", slow)):
        pace, settings = EVEN, StragglerSettings()
        began = time.perf_counter()
        for _ in range(rounds):
            pace = observed(pace, step, settings)
        answer[name] = (time.perf_counter() - began) / rounds * 1e6
    return answer


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trials: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for number, way in itertools.product(range(args.trials), args.ways):
        for answer in ("report", "rebalance"):
            try:
                trials.append(measure(folder / f"{number}-{way}-{answer}", way, answer, number % WORKERS))
                print({key: value for key, value in trials[-1].items() if key != "digests"}, flush=True)
            except JobFailed as error:
                failed.append({"system": "craft", "error": str(error)})
                print(f"FAILED: {error}", flush=True)
    noisy = measure_alarms(args, folder / "noisy") if args.noisy_steps else None
    if noisy is not None:
        print(noisy, flush=True)
    return {
        "trials": trials,
        "failed": failed,
        "noisy": noisy,
        "cost_us": {str(number): measure_cost(number, 200 if number > 100 else 2000) for number in (4, 64, 1024)},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="pairs of jobs, for each way to be slow")
    parser.add_argument("--ways", nargs="+", choices=["pulses", "device"], default=["pulses", "device"])
    parser.add_argument("--noisy-steps", type=int, default=10_000, help="of the job in which nobody is slow")
    parser.add_argument("--noisy-samples", type=int, default=8)
    parser.add_argument("--noise", type=int, default=2, help="programs beside that job")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(conduct("stragglers", parse(), run))
