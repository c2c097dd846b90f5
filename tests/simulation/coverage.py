"""Which faults struck in which states of the job: the table in docs/explanation/simulation.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .world import World

STATES = (
    "starts",
    "meets",
    "trains",
    "changes members",
    "catches up",
    "has broken off",
    "holds",
    "begins again",
    "waits for the last copy",
    "is found again",
    "is past its loop",
    "winds down",
    "makes room",
    "has no lighthouse",
)


def job_state(world: World) -> str:
    """What the job is doing, as its lighthouse knows it."""
    serving = world.serving
    if serving is None or serving.lighthouse is None or serving.process.state != "running":
        return "has no lighthouse"
    state = serving.lighthouse.loop.state
    if state.stopping is not None:
        return "over"
    if state.preempting is not None:
        return "makes room"
    if state.winding_down is not None:
        return "winds down"
    if state.restoring:
        return "begins again"
    if state.generation is None:
        return "starts"
    if state.recovering:
        return "is found again"
    if state.awaited:
        return "waits for the last copy"
    if state.holding:
        return "holds"
    members = state.having("member")
    if any(view.after_loop for view in members) or state.having("finished"):
        return "is past its loop"
    if state.generation.number in state.broken:
        return "has broken off"
    if any(view.entered < state.generation.number for view in members):
        return "meets"
    if state.upcoming is not None:
        return "changes members"
    return "catches up" if any(view.behind for view in members) else "trains"


def table(strikes: Iterable[tuple[str, str]], kinds: Iterable[str]) -> str:
    """One line per fault, one column per state, as Markdown."""
    counts = Counter(strikes)
    lines = ["| fault | " + " | ".join(STATES) + " |", "|---" * (len(STATES) + 1) + "|"]
    for kind in kinds:
        cells = (str(counts[kind, state] or "") for state in STATES)
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reached(strikes: Iterable[tuple[str, str]]) -> int:
    """How many pairs of fault and state there were."""
    return len(set(strikes))
