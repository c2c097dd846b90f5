"""Predict what each answer to a loss costs, from times measured in this job. Pure: time is an argument.

Enters: when workers were lost, joined and committed, and the step time (``CostBook``, fed by ``control/replay/timings``).
Leaves: ``TimesMeasured`` and a ``CheapestAnswer`` with its figures in words, for ``LossPolicy`` under ``--on-loss auto``.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil, inf
from typing import Literal

import msgspec
from msgspec.structs import replace

from craft.protocol.events import TimesMeasured

Answer = Literal["redo", "spare", "restart"]

_SETTLED_STEPS = 10
"""The step time of a generation counts as undisturbed after this many steps."""
_KEPT = 100
"""Arrivals and losses that are remembered."""


class CostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times assumed until they are measured."""

    spare_s: float = 1.0
    """From a loss to the first commit of a spare in the lost slot."""
    restart_s: float = 10.0
    """From a loss to the first commit of the worker started for it."""
    join_steps: float = 1.0
    """The cost of a join for the other members, in steps: they open a group and send a stripe of their state."""


class CheapestAnswer(msgspec.Struct, frozen=True):
    """The cheapest answer to a loss."""

    answer: Answer
    lost_s: float
    """Predicted loss until the end of the job."""
    reason: str


class Arrival(msgspec.Struct, frozen=True):
    """A worker that joined and has not committed a step yet."""

    worker_id: str
    lost_at: float | None
    """When its slot became free; None if no slot is free for it."""
    started: bool
    """Whether it was started for that loss; else it was a spare."""


class CostBook(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements so far."""

    generation: int = 0
    begun_at: int = 0
    """The step at which that generation began."""
    step_s: tuple[tuple[int, float], ...] = ()
    """Undisturbed step time by number of members; the latest."""
    losses: tuple[float, ...] = ()
    """When slots became free that are still empty, earliest first."""
    arrivals: tuple[Arrival, ...] = ()
    spare_s: float | None = None
    restart_s: float | None = None


def stepped(book: CostBook, *, generation: int, members: int, step: int, step_s: float) -> CostBook:
    """Add a report of ``step`` committed steps and the step time, by a member of ``generation``."""
    if generation < book.generation or not step:
        return book
    if generation > book.generation:
        return replace(book, generation=generation, begun_at=step)
    if step < book.begun_at + _SETTLED_STEPS or step_s <= 0:
        return book
    return replace(book, step_s=tuple(sorted({**dict(book.step_s), members: step_s}.items())))


def known(times: TimesMeasured | None) -> CostBook:
    """Return the book that an earlier lighthouse had, from its last ``TimesMeasured``."""
    return (
        CostBook() if times is None else CostBook(step_s=times.step_s, spare_s=times.spare_s, restart_s=times.restart_s)
    )


def lost(book: CostBook, worker_id: str, spares: Collection[str], now: float) -> CostBook:
    """Add a loss: the first of ``spares`` takes the slot, else the next arrival."""
    own = _arrival(book, worker_id)
    book = _without(book, worker_id)
    if own is not None and own.lost_at is None and worker_id in spares:
        return book
    # A replacement that never committed: its slot has been empty since the loss before.
    since = now if own is None or own.lost_at is None else own.lost_at
    free = [each for each in book.arrivals if each.worker_id in spares and each.lost_at is None]
    if not free:
        return replace(book, losses=tuple(sorted((*book.losses, since)))[-_KEPT:])
    taken = Arrival(free[0].worker_id, since, started=False)
    return replace(book, arrivals=tuple(taken if each is free[0] else each for each in book.arrivals))


def left_empty(book: CostBook) -> CostBook:
    """Leave free slots empty: no arrival takes one."""
    return replace(book, losses=(), arrivals=tuple(replace(each, lost_at=None) for each in book.arrivals))


def arrived(book: CostBook, worker_id: str) -> CostBook:
    """Add an arrival: it takes the slot that is free for longest, or is a spare."""
    since = book.losses[0] if book.losses else None
    arrivals = (*book.arrivals, Arrival(worker_id, since, started=since is not None))
    return replace(book, arrivals=arrivals[-_KEPT:], losses=book.losses[1:])


def committed(book: CostBook, worker_id: str, now: float) -> CostBook:
    """Add a commit: a worker's first one ends the recovery of its slot."""
    arrival = _arrival(book, worker_id)
    if arrival is None:
        return book
    book = _without(book, worker_id)
    if arrival.lost_at is None:
        return book
    took_s = now - arrival.lost_at
    return replace(book, restart_s=took_s) if arrival.started else replace(book, spare_s=took_s)


def _arrival(book: CostBook, worker_id: str) -> Arrival | None:
    return next((each for each in book.arrivals if each.worker_id == worker_id), None)


def _without(book: CostBook, worker_id: str) -> CostBook:
    return replace(book, arrivals=tuple(each for each in book.arrivals if each.worker_id != worker_id))


def measured(book: CostBook, *, step: int, total_steps: int | None, microbatches: int | None) -> TimesMeasured:
    """Return the measurements at the moment of a loss."""
    return TimesMeasured(
        step=step,
        total_steps=total_steps,
        microbatches=microbatches,
        step_s=book.step_s,
        spare_s=book.spare_s,
        restart_s=book.restart_s,
    )


def step_time(times: TimesMeasured, members: int) -> float | None:
    """Return the step time with so many members: measured, or scaled by the largest share."""
    known = dict(times.step_s)
    if members in known:
        return known[members]
    if not known:
        return None
    nearest = min(known, key=lambda each: (abs(each - members), each))
    microbatches = times.microbatches or nearest
    return known[nearest] * ceil(microbatches / members) / ceil(microbatches / nearest)


def choose(
    times: TimesMeasured, *, survivors: int, slots: int, spares: int, settings: CostSettings | None = None
) -> CheapestAnswer:
    """Return the answer that loses the fewest seconds until the end of the job; on a tie, redo."""
    settings = settings or CostSettings()
    slow_s, full_s = step_time(times, survivors), step_time(times, slots)
    answer: Answer = "spare" if spares else "restart"
    seen_s = times.spare_s if spares else times.restart_s
    wait_s = seen_s if seen_s is not None else (settings.spare_s if spares else settings.restart_s)
    who = f"{'a spare' if spares else 'a replacement'} {'takes' if seen_s is not None else 'is assumed to take'} {wait_s:.2g} s"
    if slow_s is None or full_s is None:
        return CheapestAnswer(answer, 0.0, f"no step time was measured yet, {who}: the lost slot is filled")
    left = inf if times.total_steps is None else max(0, times.total_steps - times.step)
    longer_s = max(0.0, slow_s - full_s)
    until = min(left, ceil(wait_s / slow_s))
    redo_s = left * longer_s if longer_s else 0.0
    fill_s = until * longer_s + settings.join_steps * full_s
    figures = f"{_left(left)}, each {longer_s:.2g} s longer with {_workers(survivors)} than with {slots}, and {who}"
    if redo_s <= fill_s:
        return CheapestAnswer(
            "redo", redo_s, f"to redo costs {redo_s:.2g} s, to fill the slot {fill_s:.2g} s: {figures}"
        )
    redo = "more and more" if redo_s == inf else f"{redo_s:.2g} s"
    return CheapestAnswer(answer, fill_s, f"to fill the slot costs {fill_s:.2g} s, to redo {redo}: {figures}")


def _left(steps: float) -> str:
    if steps == inf:
        return "an unknown number of steps is left"
    return "1 step is left" if steps == 1 else f"{steps:.0f} steps are left"


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"
