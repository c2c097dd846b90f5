"""Runs seeds, one after the other: each is a whole job."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .clock import Stuck
from .history import Violation
from .scenario import draw
from .world import World, new_folder, remove, run

_COLLECT_EVERY = 20


@dataclass(frozen=True)
class Result:
    """What came of one seed."""

    seed: int
    violation: str | None
    strikes: tuple[tuple[str, str], ...]
    story: tuple[str, ...]
    seconds: float
    """How long it took, by the virtual clock."""
    steps: int


def run_seed(seed: int, kinds: Sequence[str] = (), prepare: Callable[[World], None] = lambda _: None) -> Result:
    """Run the job of a seed, with faults of these ``kinds`` only; ``prepare`` may change it before it begins."""
    plan, events = draw(seed, kinds)
    folder = new_folder()
    before = _open_files()
    if seed % _COLLECT_EVERY == 0:
        gc.collect()
    gc.disable()
    world = World(seed, plan, folder)
    world.note(f"seed {seed}: {plan}")
    prepare(world)
    try:
        run(world, events)
    except Violation as error:
        world.violated(str(error))
    except Stuck as error:
        world.violated(f"nothing happens any more, or too much: {error}")
    finally:
        gc.enable()
        for fd in _open_files() - before:
            # Those of processes that were killed.
            os.close(fd)
        remove(folder)
    return Result(
        seed, world.violation, tuple(world.strikes), tuple(world.said), world.machine.now, world.history.furthest
    )


def _open_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            os.stat(f"/proc/self/fd/{name}")
        except OSError:
            # Of the listing itself.
            continue
        found.add(int(name))
    return found
