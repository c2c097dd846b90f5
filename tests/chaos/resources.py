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
BOUNDS = {"fds": 6.0, "sockets": 4.0, "threads": 3.0, "rss_mb": 16.0}
"""How much more of each a process may have late in its life than early, with as many peers: it has some for each of them. What
is usual counts, since a generation that is being opened or let go, or a joiner that is served, takes some more for a moment. A
leak would add some with each of the many generations."""
_ENOUGH = 5
"""Fewer looks do not say what is usual."""

Sample = dict[str, float]


class Resources:
    """The series of each process, by role and process id."""

    def __init__(self) -> None:
        self.series: dict[str, list[Sample]] = {}

    def sample(self, role: str, pids: Iterable[int], now: float, peers: int = 0) -> None:
        """Look at processes now, each of which has so many peers; one that is gone is left out."""
        for pid in pids:
            found = _look(pid)
            if found is not None:
                self.series.setdefault(f"{role} {pid}", []).append({"time": round(now, 1), "peers": peers, **found})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.series, indent=0))

    def grown(self) -> list[str]:
        """One sentence for everything that grew beyond its bound."""
        return [
            f"{name}: {what} grew from {early:g} to {late:g}, more than {bound:g}"
            for what, bound in BOUNDS.items()
            for name, early, late in self._growths(what)
            if late - early > bound
        ]

    def summary(self) -> str:
        """For people: how many were looked at, and the largest growth of each thing."""
        lines = [f"{len(self.series)} processes, {len(self._growths('fds'))} of them compared with themselves"]
        for what in BOUNDS:
            growths = self._growths(what)
            if growths:
                name, early, late = max(growths, key=lambda growth: growth[2] - growth[1])
                lines.append(f"{what}: at most {late - early:+g} ({name}: {early:g} to {late:g})")
        return "\n".join(lines)

    def _growths(self, what: str) -> list[tuple[str, float, float]]:
        """(process, early, late) for every one that lived for long."""
        found = []
        for name, samples in self.series.items():
            if samples[-1]["time"] - samples[0]["time"] < LONG_LIVED_S:
                continue
            # The beginning is left out: caches fill.
            early = samples[len(samples) // 8 : len(samples) // 2]
            late = samples[-(len(samples) // 4) :]
            for peers in {sample["peers"] for sample in late}:
                values = [[each[what] for each in part if each["peers"] == peers] for part in (early, late)]
                if min(map(len, values)) >= _ENOUGH:
                    found.append((name, statistics.median(values[0]), statistics.median(values[1])))
        return found


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
