"""What a seed makes of a job: its shape, and what happens to it when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .coverage import job_state
from .faults import FAULTS
from .plan import Plan

if TYPE_CHECKING:
    from .world import World

_SHAPES = ((1,), (2,), (3,), (2, 2), (1, 1), (1, 1, 1), (2, 1))
_RARE = {"stop job": 0.3, "preempt": 0.5, "kill all workers": 1.5, "kill lighthouse": 2.0, "kill worker": 2.0}
"""How often a fault is drawn, in comparison with the others."""


@dataclass(frozen=True)
class Event:
    """A fault that strikes at a certain time."""

    at_s: float
    kind: str

    def strike(self, world: World) -> None:
        state = job_state(world)
        if state == "over" or world.violation is not None:
            return
        whom = FAULTS[self.kind](world)
        world.note(f"{'FAULT' if whom else 'no'} {self.kind}{f': {whom}' if whom else ''} (the job {state})")
        if whom:
            world.strikes.append((self.kind, state))
            world.disturbed()


def draw(seed: int, kinds: Sequence[str] = ()) -> tuple[Plan, tuple[Event, ...]]:
    """Return the job and the faults of a seed; ``kinds``: only such faults."""
    chance = random.Random(seed * 7919 + 13)
    own = chance.random() < 0.3
    hosts = (chance.randint(1, 4),) if own else chance.choice(_SHAPES)
    first = len(hosts)
    if not own and chance.random() < 0.25:
        hosts = (*hosts, chance.randint(1, 2))
    every = chance.choice((0, 0, 3, 5))
    plan = Plan(
        hosts=hosts,
        first_hosts=first,
        own_lighthouse=own,
        steps=chance.choice((12, 20, 30)),
        microbatch_s=chance.choice((0.03, 0.06)),
        checkpoint_every=every,
        checkpoints=bool(every) or chance.random() < 0.3,
        min_workers=chance.choice((1, 1, 1, 2)) if sum(hosts[:first]) > 1 else 1,
        max_restarts=chance.choice((100, 100, 2, 0)),
    )
    return plan, tuple(_events(chance, kinds or tuple(FAULTS)))


def _events(chance: random.Random, kinds: Sequence[str]) -> list[Event]:
    weights = [_RARE.get(kind, 1.0) for kind in kinds]
    events, now = [], chance.uniform(0.3, 1.8)
    for _ in range(chance.choice((1, 2, 2, 3, 4, 5))):
        events.append(Event(now, chance.choices(kinds, weights)[0]))
        # Often while the one before is being answered.
        now += chance.choice((0.005, 0.05, 0.2, 0.5, 1.0, 2.0)) * chance.uniform(0.5, 1.5)
    return events
