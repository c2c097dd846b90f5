"""The control word: what travels along with the gradients of every step, and what comes of it.

Each member sends its own word to all; each combines all words, in the order of ranks, by the same pure function. So all
act on the same combined word at the same step boundary, without a round trip to anybody.
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is known of one computed microbatch, besides its gradient."""

    microbatch: int
    weight: float
    """Its share in the mean."""
    present: bytes
    """Bitmap over the parameters: which of them got a gradient."""
    scalars: tuple[tuple[str, float], ...] = ()
    """What ``step.log`` was given, in the order of names."""
    more: bool = True
    """Whether its stream has an item for the next step."""
    data: bool = True
    """Whether there was anything to compute: not where its stream had ended before."""
    said: tuple[str, ...] = ()
    """What an adapter has to say of it to all workers, in words."""


class Word(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One member's word."""

    step: int
    records: tuple[Record, ...] = ()
    ready: int = 0
    """The newest generation for which this member is ready."""
    stop: str | None = None
    """Why the script asked the job to stop, if it did."""
    resend: bool = False
    """A gradient changed after its bucket had been sent: exchange again, from what is held."""
    digest: bytes = b""
    """Hash of the slice of the state whose turn it is, as of the last commit; empty if it has no state."""
    probe: bytes = b""
    """Hash of the gradient of microbatch 0, where every worker computed it to compare bits."""
    buffers: tuple[int, ...] = ()
    """Module buffers that microbatch 0 changed: sent by its owner after the word."""
    able: bool = True
    """Whether this member keeps pace and can be given microbatches from the next step on."""
    save: str | None = None
    """A checkpoint is due at the boundary after this step: its tag, or "" for one without."""
    busy: bool = False
    """This member still writes its share of the last checkpoint."""
    saved: tuple[int, int] = (0, 0)
    """(branch, committed steps) of the newest checkpoint that this member knows to be complete."""
    leave: bool = False
    """The whole job is to make room: it ends at the boundary after this step, with a checkpoint."""
    wish: int = 0
    """The number of the wish for which ``save`` is said: the oldest that is not answered. 0: it is due for another reason."""
    rewinds: int = 0
    """How often this member has gone back to a checkpoint: one that joined meanwhile may not know that all have."""
    busy_us: int = 0
    """How long a microbatch took here, loading and computing, on average over this step; 0: there was none."""
    sample: bytes = b""
    """Hash of a part of the gradient of microbatch 0, from who computed it, while somebody catches up and compares it."""


class Combined(msgspec.Struct, frozen=True, kw_only=True):
    """What all members know once they have everybody's word."""

    step: int
    total_weight: float
    present: bytes
    metrics: tuple[tuple[str, float], ...]
    ready: int
    able: tuple[int, ...]
    """Ranks that can be given microbatches from the next step on."""
    stop: str | None
    resend: bool
    ended: bool
    """No stream has another item: this step is the last."""
    empty: bool
    """No microbatch of this step had any data: there was nothing to train on."""
    buffers: tuple[int, ...]
    buffers_from: int
    """The rank that sends them."""
    unequal_digests: tuple[tuple[int, ...], ...]
    """Ranks grouped by state digest; empty while all agree."""
    unequal_probes: tuple[tuple[int, ...], ...]
    save: str | None = None
    busy: bool = False
    """Whether anybody is."""
    saved: tuple[int, int] = (0, 0)
    """The newest that anybody knows."""
    leave: bool = False
    wish: int = 0
    """The wish that ``save`` answers, if it does."""
    busy_us: tuple[int, ...] = ()
    """Of each rank."""
    sample: bytes = b""
    said: tuple[str, ...] = ()
    """Of whichever microbatch, each once, in the order of words."""
