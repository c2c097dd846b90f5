"""The control word: what members send with the gradients of every step, and the combined word.

Each member sends its word to all, and combines all words, in the order of ranks, by the same pure function. So all act on
the same combined word at the same step boundary, without another round trip.
"""

from __future__ import annotations

import msgspec

Groups = tuple[tuple[int, ...], ...]
"""Ranks grouped by their value; empty while all have the same."""


class MicrobatchRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a member reports of one computed microbatch, besides its gradient."""

    microbatch: int
    weight: float
    """Its weight in the mean."""
    present: bytes
    """Bitmap over the parameters: which of them got a gradient."""
    scalars: tuple[tuple[str, float], ...] = ()
    """What ``step.log`` got, in the order of names."""
    more: bool = True
    """Whether its stream has an item for the next step."""
    data: bool = True
    """Whether there was data to compute; False if its stream had ended before."""
    said: tuple[str, ...] = ()
    """What an adapter reports of it to all workers, in words."""
    carried: int = 0
    """Bytes that it passes to the same microbatch of the next step (``step.carry``); its owner sends them after the word."""


class Carried(msgspec.Struct, frozen=True):
    """State that one microbatch passes to the next step: how many bytes, and which rank sends them."""

    microbatch: int
    rank: int
    nbytes: int


class Word(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One member's word."""

    step: int
    records: tuple[MicrobatchRecord, ...] = ()
    ready: int = 0
    """The newest generation for which this member is ready."""
    stop: str | None = None
    """Why the script asks the job to stop, if it does."""
    resend: bool = False
    """A gradient changed after its bucket was sent: exchange the held gradients again."""
    digest: bytes = b""
    """Hash of one slice of the state, in rotation, as of the last commit; empty if this member has no state."""
    probe: bytes = b""
    """Hash of the gradient of microbatch 0, in a step in which every worker computes it to compare bits."""
    buffers: tuple[int, ...] = ()
    """Module buffers that microbatch 0 changed; its owner sends them after the word."""
    able: bool = True
    """Whether this member keeps pace and can get microbatches from the next step on."""
    save: str | None = None
    """A checkpoint is due at the boundary after this step: its tag, or "" for one without."""
    busy: bool = False
    """Whether this member still writes its share of the last checkpoint."""
    saved: tuple[int, int] = (0, 0)
    """(branch, committed steps) of the newest checkpoint that this member knows to be complete."""
    leave: bool = False
    """Whether the job is preempted: it ends at the boundary after this step, with a checkpoint."""
    wish: int = 0
    """The number of the request that ``save`` answers: the oldest open one. 0: ``save`` has another reason."""
    rewinds: int = 0
    """How often this member went back to a checkpoint; a member that joined meanwhile may not know that all did."""
    busy_us: int = 0
    """Average time to load and compute a microbatch here in this step; 0 if this member computed none."""
    sample: bytes = b""
    """Hash of a part of the gradient of microbatch 0, or of the rows that it gathers, for workers that catch up."""
    touched: tuple[tuple[int, bytes], ...] | None = None
    """Module buffers that code between the steps changed, with their hashes; None: unknown."""
    newcomer: bool = False
    """Whether this member has joined and has not yet committed a step in which it computed."""
    state: bytes = b""
    """Hash of a sample of the whole state, in the first step in which a newcomer computes."""
    whole: bytes = b""
    """Hash of the whole state, in the first step after a checkpoint was taken."""
    computed: tuple[tuple[int, bytes], ...] = ()
    """Hashes of the gradients that this member computed, in a step that computes some microbatches twice."""
    repeated: tuple[tuple[int, bytes], ...] = ()
    """Hashes of the gradients that it computed again for comparison."""
    agreed: int = 0
    """Committed steps of the last state that this member knows to be equal on all."""
    stop_is_final: bool = False
    """Whether the script asks for ``stop``: a job that resumes from here trains no further."""


class UnequalBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """A module buffer that code between the steps left unequal across workers."""

    index: int
    groups: Groups


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """A microbatch that was computed by its owner and again for comparison."""

    microbatch: int
    owner: int
    other: int
    """The rank that computed it again; with one worker, the owner."""
    equal: bool
    """Whether both gradients have the same bits."""


class Combined(msgspec.Struct, frozen=True, kw_only=True):
    """The combination of all members' words; the same on every member."""

    step: int
    total_weight: float
    present: bytes
    metrics: tuple[tuple[str, float], ...]
    ready: int
    able: tuple[int, ...]
    """Ranks that can get microbatches from the next step on."""
    stop: str | None
    resend: bool
    ended: bool
    """Whether no stream has another item: this step is the last."""
    empty: bool
    """Whether no microbatch of this step had any data."""
    buffers: tuple[int, ...]
    buffers_from: int
    """The rank that sends them."""
    unequal_digests: Groups
    """Ranks grouped by state digest; empty while all agree."""
    unequal_probes: Groups
    save: str | None = None
    busy: bool = False
    """Whether any member still writes its share of the last checkpoint."""
    saved: tuple[int, int] = (0, 0)
    """The newest that any member knows."""
    leave: bool = False
    wish: int = 0
    """The request that ``save`` answers, if any."""
    busy_us: tuple[int, ...] = ()
    """By rank."""
    sample: bytes = b""
    said: tuple[str, ...] = ()
    """Of all microbatches, each text once, in the order of words."""
    carried: tuple[Carried, ...] = ()
    """In the order of microbatches."""
    unequal_states: Groups = ()
    unequal_wholes: Groups = ()
    unequal_buffer: UnequalBuffer | None = None
    repeated: tuple[Repeated, ...] = ()
    outcasts: tuple[int, ...] = ()
    """Ranks of newcomers that differ from the others: they leave, and the step is repeated without them."""
    compared: bool = False
    """Whether all members that keep pace sent the digest of a slice of the state."""
    compared_whole: bool = False
    """Whether they sent the digest of the whole state."""
    agreed: int = 0
    """The newest that any member knows."""
    stop_is_final: bool = False
    """Whether any member's script asks for ``stop``."""

    @property
    def differs(self) -> bool:
        """Whether members have different bits where they must be equal; such a step is never committed."""
        return bool(
            self.unequal_digests
            or self.unequal_probes
            or self.unequal_states
            or self.unequal_wholes
            or self.unequal_buffer is not None
            or any(not each.equal for each in self.repeated)
        )
