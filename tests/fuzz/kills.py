"""What is done to a job, drawn from a seed: which workers are killed or stopped, and at which moments."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from craft.testing.faults import PlacedFault

Moment = Literal["starting", "joined", "step", "generation", "joining", "last"]
Who = Literal["leader", "last", "any", "joiner"]

POINTS = (
    "join", "entering", "claimed", "started", "batch", "flushed", "blocks_sent", "result_part", "result_sent",
    "before_acknowledge", "acknowledging", "committed", "opening", "opened",
)  # fmt: skip
"""Points of a step at which a worker may end itself."""
POINTS_OF_JOINERS = ("staged", "fetched", "loaded", "replayed")
POINTS_OF_FEATURES = {"evaluate": "scored", "calls": "calling", "checkpoints": "saved"}


@dataclass(frozen=True)
class Kill:
    """A signal from outside, soon after a moment."""

    moment: Moment
    who: Who
    step: int = 0
    """Of the moment ``step``: so many are committed."""
    stop: bool = False
    """SIGSTOP, which shows by silence only, instead of SIGKILL."""
    delay_s: float = 0.0

    def __str__(self) -> str:
        at = f"step {self.step}" if self.moment == "step" else self.moment
        return f"{'stop' if self.stop else 'kill'} {self.who} at {at} +{1000 * self.delay_s:.0f}ms"


@dataclass(frozen=True)
class Plan:
    """All that is done to one job."""

    workers: int
    kills: tuple[Kill, ...] = ()
    faults: tuple[PlacedFault, ...] = ()
    """Placed at points of a step, by ``craft.testing``."""
    power_cut: int | None = None
    """Everything is killed after so many steps, and the job goes on with ``--resume``."""

    def __str__(self) -> str:
        told = [f"{self.workers} workers", *map(str, self.kills)]
        told += [f"{fault.kind} rank {fault.rank} at {fault.point} of step {fault.step}" for fault in self.faults]
        if self.power_cut is not None:
            told.append(f"all killed after step {self.power_cut}, then --resume")
        return "; ".join(told)


def draw_plan(seed: int, features: dict[str, str]) -> Plan:
    """What a script of these features goes through."""
    draw = random.Random(f"{seed} kills")
    workers = draw.choice([2, 2, 3])
    kills = tuple(_kill(draw) for _ in range(draw.choice([0, 1, 1, 2, 2, 3])))
    # Two workers that end themselves at their points may take the state with them: then there must be a checkpoint.
    most = 2 if workers > 2 or "checkpoints" in features else 1
    faults = tuple(_fault(draw, workers, features) for _ in range(min(most, draw.choice([0, 0, 1, 2]))))
    if not kills and not faults:
        kills = (_kill(draw),)
    # The end comes last.
    kills = tuple(sorted(kills, key=lambda kill: kill.moment == "last"))
    if kills and kills[0].moment == "joining":
        kills = (Kill(moment="step", who="any", step=draw.randint(1, 12)), *kills)
    # A stopped worker shows by its silence only: one per job is slow enough.
    kills = tuple(kill for number, kill in enumerate(kills) if not kill.stop or not any(k.stop for k in kills[:number]))
    cut = draw.randint(5, 14) if "checkpoints" in features and draw.random() < 0.5 else None
    return Plan(workers=workers, kills=kills, faults=faults, power_cut=cut)


def _kill(draw: random.Random) -> Kill:
    moment: Moment = draw.choice(["starting", "joined", "step", "step", "step", "generation", "joining", "last"])
    who: Who = "joiner" if moment == "joining" else draw.choice(["leader", "last", "any"])
    return Kill(
        moment=moment,
        who=who,
        step=draw.randint(1, 16),
        stop=moment in ("step", "joined") and draw.random() < 0.15,
        delay_s=draw.choice([0.0, 0.0, draw.uniform(0, 0.01), draw.uniform(0, 0.1)]),
    )


def _fault(draw: random.Random, workers: int, features: dict[str, str]) -> PlacedFault:
    special = [point for axis, point in POINTS_OF_FEATURES.items() if axis in features]
    point = draw.choice([*POINTS, *special * 3, *POINTS_OF_JOINERS])
    if point in POINTS_OF_JOINERS or point in special or point in ("join", "opening", "opened"):
        return PlacedFault(point=point, occurrence=draw.choice([1, 2]))
    step = 0 if point == "started" else draw.randint(0, 16)
    return PlacedFault(point=point, step=step, rank=draw.randrange(workers))
