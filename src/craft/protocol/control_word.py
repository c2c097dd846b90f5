"""The control word: what travels along with the gradients of every step, and what comes of it.

Each member sends its own word to all; each combines all words, in the order of ranks, by the same pure function. So all
act on the same combined word at the same step boundary, without a round trip to anybody.
"""

from __future__ import annotations

import msgspec

Groups = tuple[tuple[int, ...], ...]
"""Ranks grouped by what they have; empty while all have the same."""


class MicrobatchRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
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
    carried: int = 0
    """Bytes of what it leaves for the same microbatch of the next step (``step.carry``); sent by its owner after the word."""


class Carried(msgspec.Struct, frozen=True):
    """What one microbatch leaves for the next step: how many bytes, and which rank sends them."""

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
    """Hash of a part of the gradient of microbatch 0, or of the rows that it gathers, for a worker that catches up."""
    touched: tuple[tuple[int, bytes], ...] | None = None
    """Module buffers that code between the steps changed, with their hashes; None: this member cannot tell."""
    newcomer: bool = False
    """Whether this member has joined and has not yet committed a step in which it computed."""
    state: bytes = b""
    """Hash of a sample of the whole state, in the first step in which a newcomer computes."""
    whole: bytes = b""
    """Hash of the whole state, in the first step after a checkpoint was taken."""
    computed: tuple[tuple[int, bytes], ...] = ()
    """Hashes of the gradients of microbatches that this member computed, in the step in which some are computed twice."""
    repeated: tuple[tuple[int, bytes], ...] = ()
    """Hashes of those that it computed once more for comparison."""
    agreed: int = 0
    """Committed steps of the last state that this member knows to have been the same everywhere."""


class UnequalBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """A module buffer that code between the steps did not leave the same on every worker."""

    index: int
    groups: Groups


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """A microbatch that was computed by its owner and, for comparison, once more."""

    microbatch: int
    owner: int
    other: int
    """The rank that computed it once more; with one worker, the same."""
    equal: bool
    """Whether both gradients have the same bits."""


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
    unequal_digests: Groups
    """Ranks grouped by state digest; empty while all agree."""
    unequal_probes: Groups
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
    carried: tuple[Carried, ...] = ()
    """In the order of microbatches."""
    unequal_states: Groups = ()
    unequal_wholes: Groups = ()
    unequal_buffer: UnequalBuffer | None = None
    repeated: tuple[Repeated, ...] = ()
    outcasts: tuple[int, ...] = ()
    """Ranks of newcomers that differ from the others: they leave, and the step is done again without them."""
    compared: bool = False
    """Whether all who keep pace told a digest of a slice of the state."""
    compared_whole: bool = False
    """Whether they told one of all of it."""
    agreed: int = 0
    """The newest that anybody knows."""

    @property
    def differs(self) -> bool:
        """Whether members have different bits where they must have the same: such a step is never committed."""
        return bool(
            self.unequal_digests
            or self.unequal_probes
            or self.unequal_states
            or self.unequal_wholes
            or self.unequal_buffer is not None
            or any(not each.equal for each in self.repeated)
        )
