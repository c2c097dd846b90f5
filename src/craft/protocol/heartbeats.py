"""Small messages of large jobs: signs of life that say no more, how often to speak, and directives by their differences.

They stand for the whole messages of ``messages``, on one connection and in its order; a new connection begins with whole
ones. So they are as level-triggered as those.
"""

from __future__ import annotations

import msgspec

from craft.protocol.membership import Member
from craft.protocol.messages import Directive


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The host lives, and its last report on this connection is all there is to say for now. Agent to lighthouse."""

    sequence: int
    """Of that report."""


class Pace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How often agents are to speak. Lighthouse to agents; on every connection this default holds until another comes."""

    heartbeat_s: float = 0.1
    """The longest time between two messages of an agent."""
    progress_s: float = 0.0
    """0: every change is reported at once, and every heartbeat is a report. Else mere progress waits for up to this
    long, a report is repeated this often, and heartbeats in between say nothing else."""


class GenerationChange(msgspec.Struct, frozen=True, kw_only=True):
    """A generation, by what is different from another one that the receiver has."""

    base: str
    """Name of that one."""
    number: int
    nonce: str
    without: tuple[str, ...] = ()
    """Members of the base that are not in this one, or not as they were."""
    placed: tuple[tuple[int, Member], ...] = ()
    """Who is put in afterwards, at which rank; in the order of ranks."""


class Update(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A directive, by what is different from the one before it on this connection. Lighthouse to agents."""

    directive: Directive
    """Without the generations that follow here."""
    generation: GenerationChange | None = None
    upcoming: GenerationChange | None = None
