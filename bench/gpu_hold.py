"""What it costs to hold gradients on the device, in the memory of the host, or not at all (``--hold``): time and memory.

A part of ``bench/gpu.py``. One job for each, all there at the same time, and one at a time trains: a block of steps each, in
another order every time. So what changes on the machine changes for all of them. Figures are in ``gpu_hold.json`` and
``gpu_hold.txt``.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from bench.gpu_faults import SHAPES, WORKERS
from bench.jobs import CraftJob, JobFailed
from bench.stats import paired_ratio, trimmed_ratio

from craft.decide.step.gradient_memory import Hold

WAYS: tuple[str, ...] = get_args(Hold)
BLOCKS = {"small": (9, 12), "1b": (3, 3)}
"""How many blocks of each, and how many steps in one."""
FIRST_STEPS = 5
"""Of each job, before the first block: memory is as it stays, kernels are loaded, connections are open."""
LIMIT_S = 90.0
LOOK_S = 0.01


class InTurns:
    """Jobs of one size, one for each way to hold gradients; each trains when it is told to."""

    def __init__(self, size: str, folder: Path) -> None:
        self._folder = folder
        self._done = dict.fromkeys(WAYS, 0)
        for way in WAYS:
            self._upto(way).parent.mkdir(parents=True, exist_ok=True)
            self._upto(way).write_text("1")
        self.jobs = {way: self._start(way, size) for way in WAYS}

    def _upto(self, way: str) -> Path:
        return self._folder / "upto" / way

    def _start(self, way: str, size: str) -> CraftJob:
        stop, upto = str(self._folder / "stop"), str(self._upto(way))
        arguments = ["--size", size, *SHAPES[size], "--stop", stop, "--upto", upto]
        return CraftJob(self._folder / way, "gpu_job.py", arguments, WORKERS, ["--hold", way])

    def train(self, way: str, steps: int) -> float:
        """Train so many steps; return the seconds of one, from commit to commit, without the first one."""
        begin = self._done[way]
        self._done[way] += steps
        self._allow(way, self._done[way])
        rows = self._committed(way, self._done[way])
        return sum(row[-1] - row[begin] for row in rows) / len(rows) / max(1, steps - 1)

    def _allow(self, way: str, steps: int) -> None:
        # At once: a worker that looks in between must not find half of it.
        fresh = self._upto(way).with_suffix(".new")
        fresh.write_text(str(steps))
        fresh.rename(self._upto(way))

    def _committed(self, way: str, steps: int) -> list[list[float]]:
        """When each worker committed each of its steps, once there are so many."""
        deadline, job = time.monotonic() + LIMIT_S, self.jobs[way]
        while True:
            rows = [[commit.time_s for commit in found] for found in job.commits().values()]
            if len(rows) == WORKERS and all(len(row) == steps for row in rows):
                return rows
            if not job.running or time.monotonic() > deadline:
                raise JobFailed(f"{way}: {steps} steps did not come about\n{job.log_tail()}")
            time.sleep(LOOK_S)

    def end(self) -> dict[str, dict[str, int]]:
        """Let every job make its last step; return what the workers of each had of memory, the most of any."""
        (self._folder / "stop").touch()
        for way in WAYS:
            self._allow(way, 1 << 60)
        found = {}
        for way, job in self.jobs.items():
            job.wait(LIMIT_S)
            logs = list((self._folder / way / "run" / "workers").glob("*/log"))
            told = [json.loads(log.read_text().strip().splitlines()[-1]) for log in logs]
            found[way] = {name: max(each[name] for each in told) for name in told[0]}
        return found


def measure(size: str, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Blocks of ``steps`` in turns, each way first as often as the others; seconds of a step, and memory."""
    turns = InTurns(size, folder)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        for job in turns.jobs.values():
            stack.enter_context(job)
        for way in WAYS:
            turns.train(way, FIRST_STEPS)
        for number in range(rounds):
            for place in range(len(WAYS)):
                way = WAYS[(number + place) % len(WAYS)]
                times[way].append(turns.train(way, steps))
        memory = turns.end()
    return {"steps_per_block": steps, "times": times, "memory": memory}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """One line for each size and way."""
    for size, part in found.items():
        yield f"{size}: {len(part['times'][WAYS[0]])} blocks of {part['steps_per_block']} steps of each"
        for way, times in part["times"].items():
            memory = part["memory"][way]
            beside = (memory["most"] - part["memory"]["device"]["most"]) / memory["gradient"]
            yield (
                f"{size}, {way}: step {statistics.median(times) * 1e3:.1f} ms{_over_device(times, part)};"
                f" device memory {memory['most'] / 1e9:.3f} GB at most, in gradients of the model {beside:+.2f} beside device;"
                f" pinned {memory['pinned'] / memory['gradient']:.2f} gradients"
            )


def _over_device(times: Sequence[float], part: Mapping[str, Any]) -> str:
    if times is part["times"]["device"]:
        return ""
    ratio = paired_ratio(list(zip(times, part["times"]["device"], strict=True)), trimmed_ratio)
    return f", over that of device {ratio.value:.3f} (95%: {ratio.low:.3f} to {ratio.high:.3f})"


def hold(sizes: Sequence[str], folder: Path, out: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """Measure each size; what is there is written before the next one begins."""
    found: dict[str, Any] = {}
    for size in sizes:
        found[size] = measure(size, folder / size, *BLOCKS[size])
        write({"environment": environment, "sizes": found}, out)
    return found


def write(result: dict[str, Any], out: Path) -> None:
    (out / "gpu_hold.json").write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join([str(result["environment"]), "", *lines(result["sizes"])])
    (out / "gpu_hold.txt").write_text(text + "\n")
