"""What long-lived processes of a job use, over time: file descriptors, sockets, threads, memory.

Enters: processes by their roles, again and again. Leaves: a series for each, and what has grown beyond the bounds.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

import psutil

LONG_LIVED_S = 40.0
"""Who lives shorter says nothing about growth."""
BOUNDS = {"fds": 10.0, "sockets": 8.0, "threads": 3.0, "rss_mb": 16.0}
"""How much more of each a process may have at the end of its life than after a quarter of it. A group has
a thread, four file descriptors and a connection for each peer: more peers at the end, and one that is being opened or let
go, are within this. A leak would add some with each of the many generations."""

Sample = dict[str, float]


class Resources:
    """The series of each process, by role and process id."""

    def __init__(self) -> None:
        self.series: dict[str, list[Sample]] = {}

    def sample(self, role: str, pids: Iterable[int], now: float) -> None:
        """Look at processes now; one that is gone is left out."""
        for pid in pids:
            found = _look(pid)
            if found is not None:
                self.series.setdefault(f"{role} {pid}", []).append({"time": round(now, 1), **found})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.series, indent=0))

    def grown(self) -> list[str]:
        """One sentence for everything that grew beyond its bound."""
        found = []
        for name, samples in self.series.items():
            if samples[-1]["time"] - samples[0]["time"] < LONG_LIVED_S:
                continue
            for what, bound in BOUNDS.items():
                early, late = _early_and_late(samples, what)
                if late - early > bound:
                    found.append(f"{name}: {what} grew from {early:g} to {late:g}, more than {bound:g}")
        return found

    def summary(self) -> str:
        """For people: how many were looked at, and the largest growth of each thing."""
        long_lived = {
            name: samples
            for name, samples in self.series.items()
            if samples[-1]["time"] - samples[0]["time"] >= LONG_LIVED_S
        }
        lines = [f"{len(self.series)} processes, {len(long_lived)} of them lived for {LONG_LIVED_S:g} s or more"]
        for what in BOUNDS:
            growths = [
                (late - early, name, early, late)
                for name, samples in long_lived.items()
                for early, late in [_early_and_late(samples, what)]
            ]
            if growths:
                growth, name, early, late = max(growths)
                lines.append(f"{what}: at most {growth:+g} ({name}: {early:g} to {late:g})")
        return "\n".join(lines)


def _early_and_late(samples: list[Sample], what: str) -> tuple[float, float]:
    """What is usual about a quarter into the series, and at its end."""
    values = [sample[what] for sample in samples]
    width = max(3, len(values) // 10)
    quarter = len(values) // 4
    return statistics.median(values[quarter : quarter + width]), statistics.median(values[-width:])


def _look(pid: int) -> Sample | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        links = []
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:
                # Closed meanwhile.
                continue
        return {
            "fds": len(links),
            "sockets": sum(link.startswith("socket:") for link in links),
            "threads": process.num_threads(),
            "rss_mb": round(process.memory_info().rss / 2**20, 1),
        }
    except (OSError, psutil.Error):
        return None
