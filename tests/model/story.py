"""Print how a world came about, for people: what happened, and what it changed."""

from __future__ import annotations

from itertools import pairwise

from .workers import Label
from .world import Worker, World

Story = list[tuple[Label, World]]


def tell(story: Story) -> str:
    """One line per move, and below it one for each worker and directive that it changed."""
    lines = [f"at first, directive {_directive(story[0][1])}"]
    for (_, before), (label, after) in pairwise(story):
        lines.append(" ".join(label))
        for old, new in zip(before.workers, after.workers, strict=True):
            if old != new:
                lines.append(f"    {new.name}: {_worker(new)}")
        if before.targets[-1:] != after.targets[-1:]:
            lines.append(f"    directive {_directive(after)}")
    return "\n".join(lines)


def _directive(world: World) -> str:
    target = world.targets[-1]
    parts = []
    for word, generation in (("generation", target.generation), ("upcoming", target.upcoming)):
        if generation is not None:
            parts.append(f"{word}={generation.name}({','.join(generation.worker_ids)})")
    return " ".join(parts)


def _worker(worker: Worker) -> str:
    if worker.status in ("dead", "finished"):
        return worker.status
    ledger = worker.ledger
    state = "no state" if ledger.committed is None else f"committed={ledger.committed}"
    parts = [f"generation={ledger.generation}", "settled" if ledger.settled else "unsettled", state]
    if ledger.owners:
        parts.append(f"owners={list(ledger.owners)}")
    if ledger.held:
        parts.append(f"held={sorted(ledger.held)}")
    if ledger.result is not None:
        parts.append(f"result={ledger.result}")
    if worker.prepared is not None:
        parts.append(f"prepared={worker.prepared.number}")
    if worker.status == "cut":
        parts.append("(cut off)")
    return " ".join(parts)
