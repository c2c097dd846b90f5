"""Inspect workers: questions from the lighthouse to agents and on to workers, and their answers.

Unlike reports and directives, these are sent once. A sender waits for a limited time, then goes on without an answer.
"""

from __future__ import annotations

import msgspec

MAX_ENTRIES = 100
"""Most of a worker's latest collectives in an answer."""


class Look(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask what workers are doing. Lighthouse to agent; agent to worker, for what only the worker knows."""

    number: int
    """The number of the question; the answer has the same."""
    worker_ids: tuple[str, ...] = ()
    """Empty: all workers of the host."""


class Stacks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The stacks of a worker's threads, by itself, the main thread's last. Worker to agent."""

    number: int
    """The number of the question."""
    worker_id: str
    text: str


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective that the script itself started, as torch's Flight Recorder has it."""

    group: str
    number: int
    """Within its group, from 1."""
    name: str
    """all_reduce, broadcast, ..."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Of its input."""
    dtypes: tuple[str, ...] = ()
    done: bool = False


class Collectives(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a worker knows of the collectives that its script started. Worker to agent."""

    number: int
    """Of the question."""
    worker_id: str
    rank: int | None = None
    """Its rank in the script's own default group; None: it has none."""
    groups: dict[str, tuple[int, ...]] = {}
    """The ranks of each group that it is in."""
    entries: tuple[Collective, ...] = ()
    """The latest ones, in the order in which they were started."""


class RecentStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a worker committed."""

    step: int
    generation: int
    time: float
    """In seconds since 1970."""
    elapsed_s: float | None
    """Since the commit before it; None if that is not known."""
    microbatches: tuple[int, ...]


class CloseUp(msgspec.Struct, frozen=True, kw_only=True):
    """A worker from close up, as its agent sees it."""

    worker_id: str
    host: str
    pid: int
    time: float
    """When it was looked at, in seconds since 1970."""
    state: str
    """What the kernel says: ``stopped by a signal``, ``asleep in the kernel (...)``, ..."""
    stopped: bool
    phase: str
    """What its main thread does: loading, computing, exchanging, ...; empty before it has said anything."""
    doing: str
    """The same in words, with step and microbatch."""
    since_s: float | None
    """For how long it has been doing that."""
    step: int | None
    microbatch: int | None
    gil_kept_s: float | None
    """For how long no other Python thread of it has run, where that is worth saying."""
    generation: int
    """The one it acts under, by its own account."""
    rank: int | None
    members: tuple[str, ...]
    """Of that generation, in the order of ranks; the first 256."""
    waits_for: tuple[str, ...] = ()
    """If it is in the exchange: members that are not, or are a step behind. Filled in by the lighthouse."""
    recent_steps: tuple[RecentStep, ...] = ()
    """The latest that it committed, the newest last."""
    stacks: str = ""
    """Of its Python threads; the kernel's view where it could not answer."""
    collectives: Collectives | None = None
    """None if its script started no collective, or if it did not answer."""
    replica: int | msgspec.UnsetType = msgspec.UNSET
    position: int | msgspec.UnsetType = msgspec.UNSET
    """Its slot, as of its last commit; unset where every replica is one worker."""
    mates: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """The workers of its replica then, in the order of positions."""


class Looked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent's answer. Agent to lighthouse."""

    number: int
    """The number of the question."""
    workers: tuple[CloseUp, ...]
