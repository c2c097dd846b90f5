"""The inner loop of ``job.steps`` and ``job.attempts``: hand the script one microbatch after another.

Input: a ``MicrobatchWork``, which says what to compute next and holds what came of it. Output: the data of each microbatch, with
buffers and random numbers that do not depend on the worker that computes it. Runs on the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from craft.protocol.values.activity import Phase
from craft.telemetry.fault_points import reach
from craft.worker.data import rng
from craft.worker.data.skipping import SkippingSource
from craft.worker.data.sources import ENDED
from craft.worker.loop.inner_loop.hooks import StepHooks
from craft.worker.loop.inner_loop.injected_faults import strike
from craft.worker.monitor.repeated_microbatch import place_of
from craft.worker.report.activity_page import ActivityPage
from craft.worker.state.carried_state import CarriedLane


class ScriptNotes:
    """What the script says about the microbatch that it computes."""

    def __init__(self) -> None:
        self.scalars: dict[str, float | torch.Tensor] = {}
        """What the script logged."""
        self.said: list[str] = []
        """Texts that an adapter attached."""
        self.lane: CarriedLane | None = None
        """The values that it reads and leaves, if it carries any."""


class CurrentStep(Protocol):
    """The step that a script is in, as its loop sees it: a ``Step`` or a ``StepAttempt``."""

    microbatch: int | None
    """Microbatch being computed; None outside the inner loop."""
    notes: ScriptNotes

    @property
    def _place(self) -> tuple[int, int | None]: ...

    @property
    def _done(self) -> bool: ...

    @property
    def _is_ahead(self) -> bool: ...

    @property
    def _company(self) -> tuple[int, int] | None: ...

    @property
    def _call(self) -> Callable[[str, bytes], list[bytes]] | None: ...


class MicrobatchWork(Protocol):
    """The microbatches of one inner loop. A number below 0 stands for one that is computed only for comparison.

    ``inner_loop`` calls ``next_microbatch``, ``fetch``, ``start`` and, after the script's code, ``hold``, in this order.
    """

    def next_microbatch(self) -> int | None:
        """Return what to compute next; None at the end of the loop."""

    def fetch(self, microbatch: int) -> Any:
        """Return its data; ENDED if its stream has ended."""

    def start(self, microbatch: int, weight: float) -> None:
        """Make buffers and gradients ready for its forward and backward."""

    def hold(self, microbatch: int, notes: ScriptNotes) -> bool:
        """Take what came of it; return whether it counts."""

    def hold_empty(self, microbatch: int) -> None:
        """Hold a microbatch without data."""


class InnerLoop:
    """Runs inner loops of one training loop. Owned by the main thread."""

    def __init__(
        self, source: SkippingSource, seed: int, activity: ActivityPage, hooks: StepHooks, lane: tuple[int, ...] = ()
    ) -> None:
        """``lane`` tells the random numbers of this worker's part of a microbatch from those of other parts."""
        self._lane = lane
        self._source = source
        self._seed = seed
        self._activity = activity
        self._hooks = hooks

    def run(self, step: CurrentStep, work: MicrobatchWork, *phase: int) -> Iterator[Any]:
        """Yield the data of each microbatch of ``work``; ``phase`` tells apart several loops of one step."""
        number, _ = step._place
        while (microbatch := work.next_microbatch()) is not None:
            place = place_of(microbatch)
            step.microbatch, step.notes = place, ScriptNotes()
            self._activity.now(Phase.LOADING, number, place)
            data = work.fetch(microbatch)
            if data is ENDED:
                step.microbatch = None
                work.hold_empty(microbatch)
                continue
            work.start(microbatch, self._source.weight(number, place))
            rng.seed_all(rng.derive(self._seed, rng.COMPUTE, number, place, *phase, *self._lane))
            reach("batch", number)
            self._activity.now(Phase.COMPUTING, number, place)
            strike(number)
            self._hooks.reach("batch_start", microbatch=place)
            yield data
            step.microbatch = None
            if work.hold(microbatch, step.notes):
                self._hooks.reach("after_backward", microbatch=place)
