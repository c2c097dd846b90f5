"""The activity of a worker's main thread: written by the worker, read by its agent, judged in ``decide``."""

from __future__ import annotations

from enum import IntEnum

import msgspec
from msgspec.structs import replace


class Phase(IntEnum):
    """A phase of the main thread. The file has these numbers: never change one; add new ones at the end."""

    STARTING = 0
    """The script runs up to ``craft.join()`` and on to its first step."""
    JOINING = 1
    """Waits for a generation or enters one."""
    LOADING = 2
    """Fetches the data of a microbatch."""
    COMPUTING = 3
    """The script's code computes a microbatch."""
    EXCHANGING = 4
    """Exchanges gradients: waits for the other members."""
    UPDATING = 5
    """The script's code after the exchange: the update, and anything else between the steps."""
    PAUSED = 6
    """The script announced that it will be busy for long, and why."""
    EVALUATING = 7
    """Computes its share of an evaluation."""
    ENDING = 8
    """Every step is committed; the script runs to its end."""
    CALLING = 9
    """Is in a call between the steps: waits for the other members."""

    @property
    def word(self) -> str:
        return self.name.lower()


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """What a main thread is doing, and how long it usually takes. Times are on its host's monotonic clock."""

    phase: Phase
    since: float
    """When the phase began."""
    step: int | None = None
    microbatch: int | None = None
    reason: str = ""
    """Why it is paused."""
    commits: int = 0
    """Steps that this process has committed."""
    changes: int = 0
    """Counts phases: two readings with the same count are of the same phase."""
    longest: tuple[float | None, ...] = (None,) * len(Phase)
    """The longest recent duration of each phase, in seconds; None if it was never completed."""
    beat: float | None = None
    """When another Python thread of the process last ran; None without one. It does not change while the GIL is held."""

    @property
    def words(self) -> str:
        """For people: ``computing microbatch 3 of step 41``."""
        if self.phase is Phase.PAUSED:
            return f"paused ({self.reason})" if self.reason else "paused"
        place = "" if self.step is None else f"step {self.step}"
        if self.phase in (Phase.LOADING, Phase.COMPUTING) and place:
            return (
                f"{self.phase.word} {place if self.microbatch is None else f'microbatch {self.microbatch} of {place}'}"
            )
        if self.phase is Phase.UPDATING:
            return f"in the script's code after the exchange{f' of {place}' if place else ''}"
        if self.phase is Phase.CALLING:
            return f"in a call between the steps{f', after {place}' if place else ''}"
        if self.phase is Phase.EXCHANGING:
            return f"in the exchange{f' of {place}' if place else ''}"
        return f"{self.phase.word}{f' at {place}' if place else ''}"

    def shifted(self, by_s: float) -> Doing:
        """Return the same activity with its times moved ahead by ``by_s``."""
        beat = None if self.beat is None else self.beat + by_s
        return replace(self, since=self.since + by_s, beat=beat)
