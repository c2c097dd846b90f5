"""One soak from its start to what can be said about it: whether it is exact, whether it was live, what it used.

Enters: a folder, a seed, a length. Leaves: a ``Verdict``. ``test_soak`` wants one without problems, ``__main__`` prints them
as rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.integration.jobs import Jobs, describe

from craft.telemetry.records.journal import read_lines
from craft.testing import history, liveness

from .soak import WHOLE, Shape, Soak

_REFERENCE_S = 1200.0


@dataclass(frozen=True)
class Verdict:
    """How a soak went."""

    seed: int
    steps: int
    exact: bool
    """Whether it kept P1 to P3, and ended with the bits of an undisturbed job of one replica."""
    faults: Counter[str]
    """How many of each kind."""
    longest: liveness.Pause | None
    unjustified: tuple[str, ...]
    """Pauses for which the journal gives no reason, and an end that is not the right one."""
    problems: tuple[str, ...]
    """All that is wrong, the unjustified pauses included."""

    @property
    def row(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        pause = "none" if self.longest is None else f"{self.longest.length_s:.1f} s: {self.longest.reason}"
        return (
            f"seed {self.seed:<4} {'exact' if self.exact else 'NOT EXACT':9} {self.steps:6} steps  {len(self.unjustified)}"
            f" unjustified pauses  {sum(self.faults.values())} faults ({faults})  longest pause {pause}"
        )


def soak_once(folder: Path, seed: int, length_s: float, every_s: float, shape: Shape = WHOLE) -> Verdict:
    """Run one soak; AssertionError if it does not come to its end."""
    folder.mkdir(parents=True)
    soak = Soak(folder, shape)
    try:
        soak.begin()
        print(soak.torment(seed, length_s, every_s), flush=True)
        soak.recover()
        ends = soak.stop()
    finally:
        soak.close()
    report = history.check(soak.run_dir, None, soak.run_dirs)
    live = liveness.check(soak.run_dir, soak.run_dirs, [soak.outside], exit_code=0)
    wrong = [f"host {host} ended badly{describe(end)}" for host, end in ends.items() if end.exit_code != 0]
    bits = [*report.violations, *_reference(soak, report)]
    return Verdict(
        seed=seed,
        steps=report.steps,
        exact=not bits,
        faults=faults_of(soak),
        longest=live.longest,
        unjustified=live.violations,
        problems=(*wrong, *bits, *live.violations, *soak.resources.grown()),
    )


def _reference(soak: Soak, report: history.HistoryReport) -> list[str]:
    """Compute the same steps undisturbed, on one replica, and say how the end of the soak differs from that."""
    jobs, shape = Jobs(soak.folder / "reference"), soak.shape
    steps = ("--steps", str(report.steps))
    alone = jobs.run(shape.script, *steps, workers=shape.replica_size, options=shape.options, limit_s=_REFERENCE_S)
    assert alone.exit_code == 0, describe(alone)
    wanted = history.check(alone.run_dir).digest
    if report.digest == wanted:
        return []
    return [f"P1: after {report.steps} steps the state is {report.digest}, and undisturbed {wanted}"]


def faults_of(soak: Soak) -> Counter[str]:
    lines = [*read_lines(soak.run_dir / "journal.jsonl"), *read_lines(soak.outside)]
    return Counter(line["fault"] for line in lines if line.get("event") == "FaultInjected")
