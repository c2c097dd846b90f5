"""The record of a worker's entry into a generation: one line of ``generations.jsonl``."""

from __future__ import annotations

import msgspec


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """Times on the way into a generation, in seconds since 1970 on the clock of the worker's host."""

    told: float = 0.0
    """When the directive arrived."""
    aborted: float | None = None
    """When the old group was aborted; None if it was not."""
    met: float = 0.0
    """When the new group was open."""


class Entered(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that a worker has entered and settled."""

    generation: int
    time: float
    """When it was settled."""
    told: float
    aborted: float | None
    met: float
    entered: float
    """When the main thread arrived: from the aborted exchange, or at its step boundary."""
    agreed: bool
    """Whether all entered it at an agreed step boundary; if not, something had failed."""
    members: tuple[str, ...]
    lost: tuple[str, ...]
    """Members of the previous generation that are not in this one."""
    joiners: tuple[str, ...]
    """Members that have no state yet."""
    idle: tuple[str, ...]
    """Members that get no microbatches yet: joiners, and those that catch up."""
    step: int
    """The step that is resumed or begins."""
    commits: bool
    """Whether this worker committed the step before it only now, with the result that it held."""
    retried: bool
    """Whether ``step`` had begun before: some of its gradients are or were held."""
    given: tuple[int, ...]
    """Microbatches of ``step`` that no member held or had begun."""
    mine: tuple[int, ...]
    """Those of ``given`` that this worker computes."""
    dropped: tuple[int, ...]
    again: tuple[int, ...] = ()
    """Microbatches of ``step`` that a member had computed, no longer holds, and computes again."""
    log_bytes: int = 0
    """Size of this worker's log at entry: what it prints in this generation comes after that."""
    leader: str | None = None
    """After a loop: the member that does the leader's work there. None: the first member."""
    guest: bool = False
    """Whether its loop is not CRAFT's: it opened no group, and CRAFT does not settle its step in flight."""
