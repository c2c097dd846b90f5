"""Journal lines that are neither job events nor actions, and the type of every line."""

from __future__ import annotations

import msgspec

from craft.protocol.actions import AnyAction
from craft.protocol.events import AnyEvent
from craft.protocol.membership import Slot
from craft.protocol.values.event import Event


class LighthouseStarted(Event, frozen=True, kw_only=True, tag=True):
    """A lighthouse began to serve."""

    pid: int
    url: str
    generation: int
    """The generation that it found; 0 without one."""
    restarted: bool = False
    slots: int = 0


class LighthouseAlone(Event, frozen=True, kw_only=True, tag=True):
    """The lighthouse hears no agent."""

    pid: int
    silent_s: float


class LighthouseHeard(Event, frozen=True, kw_only=True, tag=True):
    """The lighthouse hears the first agent again."""

    host: str
    alone_s: float


class FileDamaged(Event, frozen=True, kw_only=True, tag=True):
    """A file of the run directory is damaged; the lighthouse goes on."""

    file: str
    detail: str
    """What is wrong with it, and what was done about it."""


class Cost(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag=True):
    """What was lost by one fault, or by several that were overcome together."""

    worker_ids: tuple[str, ...]
    """Those whose loss it was; empty if an exchange broke without a loss."""
    generation: int
    """Under which the first step afterwards was committed."""
    step: int
    """That step."""
    lost_ms: float | None
    """Time from commit to commit, less an undisturbed step; None if no step was committed before."""
    steps_retried: int
    """Steps that had begun and were taken up again; a committed one never is."""
    microbatches_redone: int
    """Of these steps, computed in the place of the lost workers."""
    samples_redone: int | None
    """Samples in them; None where only the script knows: in streams."""
    microbatches_dropped: int = 0
    samples_dropped: int | None = 0


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag=True):
    """One event by which workers were lost while the job was not ending."""

    worker_ids: tuple[str, ...]
    reason: str
    generation: int
    """The generation that it hit; 0 before the first one."""
    next_generation: int | None = None
    """The generation that was made because of it, if one was."""
    seen: float = 0.0
    """When it was seen, in seconds since 1970."""
    host: str | None = None
    """Set if the whole host was lost."""
    cost: Cost | None = None
    """What it cost, once a step is committed again."""
    slots: tuple[Slot | None, ...] | msgspec.UnsetType = msgspec.UNSET
    """Replica and position of each of ``worker_ids``; None for a spare; unset where every replica is one worker."""


LighthouseEvent = LighthouseStarted | LighthouseAlone | LighthouseHeard | FileDamaged

RECORDS: dict[str, dict[str, type[msgspec.Struct]]] = {
    "event": {each.__name__: each for each in (*AnyEvent.__args__, *LighthouseEvent.__args__)},
    "action": {each.__name__: each for each in AnyAction.__args__},
    "outcome": {"Fault": Fault, "Cost": Cost},
}
"""The type of a line, by its kind and its name."""
