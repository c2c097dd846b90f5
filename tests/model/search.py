"""Breadth-first search over all reachable worlds: no promise is broken, and the end can be reached from everywhere.

Breadth first, so that the story of a violation is a shortest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from craft.protocol.errors import ProtocolViolation

from . import lighthouse, workers
from .rules import Rules
from .story import Story, tell
from .workers import Label
from .world import Bounds, Violation, World, pruned


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the search came to."""

    num_worlds: int
    num_moves: int
    violation: str | None = None
    story: str = ""


class Graph:
    """Worlds by number, with how each was reached and which others reach it without a fault."""

    def __init__(self, first: World) -> None:
        self.worlds = [first]
        self.numbers = {first: 0}
        self.came_from: list[tuple[int, Label]] = [(-1, ())]
        self.before: list[list[int]] = [[]]
        self.num_moves = 0

    def add(self, origin: int, label: Label, world: World, *, fault: bool) -> int | None:
        """Note a move; return the number of the world it leads to if that was not known."""
        self.num_moves += 1
        number = self.numbers.get(world)
        fresh = number is None
        if number is None:
            number = self.numbers[world] = len(self.worlds)
            self.worlds.append(world)
            self.came_from.append((origin, label))
            self.before.append([])
        if not fault:
            self.before[number].append(origin)
        return number if fresh else None

    def story_of(self, number: int) -> Story:
        steps: list[tuple[Label, World]] = []
        while number > 0:
            origin, label = self.came_from[number]
            steps.append((label, self.worlds[number]))
            number = origin
        return [((), self.worlds[0]), *reversed(steps)]


class AllMoves(Protocol):
    """Yields (whether it is a fault, (label, world)) for everything that can happen in a world."""

    def __call__(self, world: Any, bounds: Any, rules: Any, /) -> Iterator[tuple[bool, tuple[Label, World]]]: ...


def search(bounds: Bounds, rules: Rules | None = None, *, max_worlds: int = 3_000_000) -> Found:
    """Visit every reachable world of a job whose replicas are one worker each; stop at the first violation."""
    rules = rules or Rules()
    return explore(lighthouse.first_world(bounds, rules), all_moves, bounds, rules, max_worlds)


def explore(first: World, moves: AllMoves, bounds: Bounds, rules: Any, max_worlds: int) -> Found:
    """Visit every world that ``moves`` leads to; stop at the first violation."""
    graph = Graph(pruned(first, bounds))
    queue = deque([0])
    while queue:
        origin = queue.popleft()
        world = graph.worlds[origin]
        label: Label = ("?",)
        try:
            for fault, (label, after) in moves(world, bounds, rules):
                number = graph.add(origin, label, pruned(after, bounds), fault=fault)
                if number is not None:
                    queue.append(number)
        except (Violation, ProtocolViolation) as violation:
            return _violated(graph, origin, str(violation))
        if len(graph.worlds) > max_worlds:
            raise RuntimeError(f"more than {max_worlds} worlds: narrow the bounds")
    return _check_progress(graph)


def all_moves(world: World, bounds: Bounds, rules: Rules) -> Iterator[tuple[bool, tuple[Label, World]]]:
    """Everything that workers, the lighthouse and faults can do."""
    for move in workers.moves(world, bounds, rules):
        yield False, move
    for move in lighthouse.moves(world, bounds, rules):
        yield False, move
    for move in lighthouse.faults(world, bounds, rules):
        yield True, move


def _violated(graph: Graph, number: int, violation: str) -> Found:
    story = f"{tell(graph.story_of(number))}\nand then: {violation}"
    return Found(num_worlds=len(graph.worlds), num_moves=graph.num_moves, violation=violation, story=story)


def _check_progress(graph: Graph) -> Found:
    """From every world, though no more faults happen, the job must be able to finish."""
    reaching = {number for number, world in enumerate(graph.worlds) if world.job.stopping is not None}
    todo = list(reaching)
    while todo:
        for origin in graph.before[todo.pop()]:
            if origin not in reaching:
                reaching.add(origin)
                todo.append(origin)
    stuck = next((number for number in range(len(graph.worlds)) if number not in reaching), None)
    if stuck is not None:
        return _violated(graph, stuck, "from here the job never finishes, though nothing else goes wrong")
    return Found(num_worlds=len(graph.worlds), num_moves=graph.num_moves)
