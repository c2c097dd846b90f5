"""How a worker came into a generation, as it writes it down: one line of ``generations.jsonl``."""

from __future__ import annotations

import msgspec


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """When what happened on the way into a generation, in seconds since 1970 on the clock of the worker's host."""

    told: float = 0.0
    """The directive came."""
    aborted: float | None = None
    """The old group was aborted; None if it was not."""
    met: float = 0.0
    """The new group was open."""


class Entered(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that a worker has entered and settled."""

    generation: int
    time: float
    """When it was settled."""
    told: float
    aborted: float | None
    met: float
    entered: float
    """When the main thread came: out of the exchange that was aborted, or to its step boundary."""
    agreed: bool
    """Whether all entered it at a step boundary that they had agreed on; if not, something had failed."""
    members: tuple[str, ...]
    lost: tuple[str, ...]
    """Members of the one before that are not in this one."""
    joiners: tuple[str, ...]
    """Members that have no state yet."""
    idle: tuple[str, ...]
    """Members that are given no microbatches yet: joiners, and those that catch up."""
    step: int
    """The step that goes on, or begins."""
    commits: bool
    """Whether this worker committed the step before it only now, with the result that it had in hand."""
    retried: bool
    """Whether that step had begun before: gradients of it are held, or were."""
    given: tuple[int, ...]
    """Microbatches of it that nobody held or had begun."""
    mine: tuple[int, ...]
    """Those of them that this worker computes."""
    dropped: tuple[int, ...]
    again: tuple[int, ...] = ()
    """Microbatches of it that a member had computed, does not hold any more, and computes again."""
    log_bytes: int = 0
    """Size of this worker's log then: what it prints as a member of this generation comes after that."""
    leader: str | None = None
    """After a loop: who does what the leader has to do there. None: the first of the members."""
    guest: bool = False
    """Whether its loop is not CRAFT's: it has met nobody, and what becomes of the step in flight is for others to say."""
