"""What each answer to a loss costs, predicted from times that were measured in this very job. Pure: time is an argument.

Enters: when workers were lost, came and committed, and how long steps take (``Book``, fed by ``control.meter``). Leaves:
``TimesMeasured``, all that a prediction rests on, and a ``Choice`` with its figures in words. ``LossPolicy`` asks for one
under ``--on-loss auto``.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Literal

import msgspec
from msgspec.structs import replace

from craft.protocol.events import TimesMeasured

Answer = Literal["redo", "spare", "restart"]

_SETTLED_STEPS = 10
"""After so many steps in a generation its step time counts as undisturbed."""


class CostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is assumed of times until they were measured."""

    spare_s: float = 1.0
    """From a loss to the first commit of a spare in the lost slot."""
    restart_s: float = 10.0
    """From a loss to the first commit of a worker that was started because of it."""
    join_steps: float = 1.0
    """What it costs the others to let somebody join, in steps: they open a group, and copy a stripe of their state."""


class Choice(msgspec.Struct, frozen=True):
    """The cheapest answer to a loss."""

    answer: Answer
    lost_s: float
    """Seconds that the job is predicted to lose by it until its end."""
    reason: str


class Arrival(msgspec.Struct, frozen=True):
    """A latecomer that has not committed anything yet."""

    worker_id: str
    time: float
    """When it came to its first step."""


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured so far."""

    generation: int = 0
    begun_at: int = 0
    """The step at which that generation began."""
    step_s: tuple[tuple[int, float], ...] = ()
    """Undisturbed step time, by the number of members; the latest."""
    lost_at: float | None = None
    """When somebody was lost last."""
    arrivals: tuple[Arrival, ...] = ()
    spare_s: float | None = None
    restart_s: float | None = None


def stepped(book: Book, *, generation: int, members: int, step: int, step_s: float) -> Book:
    """A member of ``generation`` says that it has committed ``step`` steps, and how long one takes."""
    if generation < book.generation or not step:
        return book
    if generation > book.generation:
        return replace(book, generation=generation, begun_at=step)
    if step < book.begun_at + _SETTLED_STEPS or step_s <= 0:
        return book
    return replace(book, step_s=tuple(sorted({**dict(book.step_s), members: step_s}.items())))


def lost(book: Book, now: float) -> Book:
    """A member was lost."""
    return replace(book, lost_at=now)


def arrived(book: Book, worker_id: str, now: float) -> Book:
    """A latecomer has come to its first step."""
    return replace(book, arrivals=(*book.arrivals, Arrival(worker_id, now))[-100:])


def committed(book: Book, worker_id: str, now: float) -> Book:
    """A latecomer committed its first step: by then the latest loss was made up for. One that was there before is a spare."""
    arrival = next((each for each in book.arrivals if each.worker_id == worker_id), None)
    if arrival is None:
        return book
    book = replace(book, arrivals=tuple(each for each in book.arrivals if each is not arrival))
    if book.lost_at is None:
        return book
    took_s = now - book.lost_at
    return replace(book, spare_s=took_s) if arrival.time < book.lost_at else replace(book, restart_s=took_s)


def measured(book: Book, *, step: int, total_steps: int | None, microbatches: int | None) -> TimesMeasured:
    """Return all that is known at the moment of a loss."""
    return TimesMeasured(
        step=step,
        total_steps=total_steps,
        microbatches=microbatches,
        step_s=book.step_s,
        spare_s=book.spare_s,
        restart_s=book.restart_s,
    )


def step_time(times: TimesMeasured, members: int) -> float | None:
    """Return how long a step takes with so many members: as measured, or else by the largest share of one of them."""
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
) -> Choice:
    """Return the answer that loses the fewest seconds until the end of the job; the simpler one of two that lose the same."""
    settings = settings or CostSettings()
    slow_s, full_s = step_time(times, survivors), step_time(times, slots)
    answer: Answer = "spare" if spares else "restart"
    seen_s = times.spare_s if spares else times.restart_s
    wait_s = seen_s if seen_s is not None else (settings.spare_s if spares else settings.restart_s)
    who = f"{'a spare' if spares else 'a replacement'} {'takes' if seen_s is not None else 'is assumed to take'} {wait_s:.2g} s"
    if slow_s is None or full_s is None:
        return Choice(answer, 0.0, f"no step time was measured yet, {who}: the lost slot is filled")
    left = inf if times.total_steps is None else max(0, times.total_steps - times.step)
    longer_s = max(0.0, slow_s - full_s)
    until = min(left, ceil(wait_s / slow_s))
    redo_s = left * longer_s if longer_s else 0.0
    fill_s = until * longer_s + settings.join_steps * full_s
    steps = "an unknown number of steps is left" if left == inf else f"{left:.0f} steps are left"
    figures = f"{steps}, each {longer_s:.2g} s longer with {survivors} workers than with {slots}, and {who}"
    if redo_s <= fill_s:
        return Choice("redo", redo_s, f"to redo costs {redo_s:.2g} s, to fill the slot {fill_s:.2g} s: {figures}")
    return Choice(answer, fill_s, f"to fill the slot costs {fill_s:.2g} s, to redo {redo_s:.2g} s: {figures}")
