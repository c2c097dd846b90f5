"""The files of a run that never was: each test changes what it is about, and writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS = 4
DROPPING = {"0": "w0", "1": "w0", "2": None, "3": "w0"}
"""A plan in which nobody computed microbatch 2."""
Lines = list[dict[str, Any]]
EVERY_LINE = {"time": 0.0, "reason": "", "name": "c", "url": "store", "branch": 0, "checkpoint": "c", "limit_s": 60.0}
"""What records have that no test is about."""


class Files:
    """A run of two workers, w0 and w1, in which w1 is lost in step 2, before anybody has committed it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        both = {"0": "w0", "1": "w0", "2": "w1", "3": "w1"}
        alone = dict.fromkeys(both, "w0")
        self.steps: dict[str, Lines] = {
            "w0": [commit("w0", step, 1, both) for step in (0, 1)] + [commit("w0", step, 2, alone) for step in (2, 3)],
            "w1": [commit("w1", step, 1, both) for step in (0, 1)],
        }
        self.metrics: Lines = [{"step": step, "time": 0.0, "loss": 1.0} for step in range(STEPS)]
        self.journal: Lines = [
            {"kind": "event", "event": "WorkerJoined", "member": {"worker_id": worker}} for worker in ("w0", "w1")
        ]
        self.journal += [
            {"kind": "action", "action": "Reconfigure", "generation": 1, "members": ["w0", "w1"]},
            {"kind": "event", "event": "WorkerLost", "worker_id": "w1", "reason": "killed by SIGKILL"},
            {"kind": "action", "action": "Reconfigure", "generation": 2, "members": ["w0"]},
            {"kind": "event", "event": "StepRetried", "generation": 2, "step": 2, "given": [2, 3], "dropped": []},
            finished("w0"),
        ]
        self.on_loss = "redo"
        self.entries: dict[str, Lines] = {}
        """Generations that a worker came into, where a test is about that."""

    def write(self) -> Path:
        for worker, lines in self.steps.items():
            write_lines(self.folder / "workers" / worker / "steps.jsonl", lines)
        for worker, lines in self.entries.items():
            write_lines(self.folder / "workers" / worker / "generations.jsonl", lines)
        write_lines(self.folder / "metrics.jsonl", self.metrics)
        write_lines(self.folder / "journal.jsonl", [{**EVERY_LINE, **line} for line in self.journal])
        (self.folder / "config.toml").write_text(f'[run]\non_loss = "{self.on_loss}"  # default\n')
        return self.folder


def commit(worker: str, step: int, generation: int, plan: Mapping[str, str | None], **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "branch": 0,
        "time": float(step),
        "generation": generation,
        "world_size": 2 if generation == 1 else 1,
        "microbatches": [int(number) for number, owner in plan.items() if owner == worker],
        "plan": plan,
        **more,
    }


def joined(worker: str, step: int, generation: int) -> dict[str, Any]:
    """How a worker without state came into a generation."""
    times = dict.fromkeys(("time", "told", "met", "entered"), 0.0)
    none: dict[str, Any] = {name: [] for name in ("lost", "given", "mine", "dropped")}
    those = {"members": ["w0", worker], "joiners": [worker], "idle": [worker]}
    flags = {"agreed": True, "commits": False, "retried": False, "aborted": None}
    return {"generation": generation, "step": step, **times, **none, **those, **flags}


def finished(worker: str, digest: str = "d1") -> dict[str, Any]:
    return {
        "kind": "event",
        "event": "WorkerFinished",
        "worker_id": worker,
        "step": STEPS,
        "digest": digest,
        "complete": True,
    }


def write_lines(path: Path, lines: Lines) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def spread(files: Files) -> list[Path]:
    files.write()
    places = []
    for number, worker in enumerate(("w0", "w1")):
        place = files.folder.with_name(f"host{number}")
        write_lines(place / "workers" / worker / "steps.jsonl", files.steps[worker])
        (place / "config.toml").write_text(f'[run]\non_loss = "{files.on_loss}"  # default\n')
        places.append(place)
    write_lines(places[0] / "metrics.jsonl", files.metrics)
    for name in ("metrics.jsonl", "config.toml"):
        (files.folder / name).unlink()
    shutil.rmtree(files.folder / "workers")
    return places
