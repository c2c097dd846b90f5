"""``StepAttempt``: one attempt at a step of ``job.attempts``, as the script sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol

import torch

from craft.protocol.errors import ConfigError, GroupError
from craft.worker.loop.inner_loop.microbatch import ScriptNotes
from craft.worker.reduce.user_reduce import Reduced
from craft.worker.report.metrics import checked

_CALLS = ("all_reduce", "broadcast_object", "barrier")


class AttemptLoop(Protocol):
    """What an attempt asks of its loop, ``Attempts``."""

    def enter(self, attempt: StepAttempt) -> None: ...

    def microbatches(self, attempt: StepAttempt, params: list[torch.nn.Parameter]) -> Iterator[Any]: ...

    def company(self, attempt: StepAttempt) -> tuple[int, int]: ...

    def call(self, attempt: StepAttempt, name: str, data: bytes) -> list[bytes]: ...

    def interrupted(self, attempt: StepAttempt) -> None: ...

    def conclude(self, attempt: StepAttempt) -> None: ...


class StepAttempt:
    """One attempt at a step; ``with attempt:`` encloses its body.

    All workers commit its updates together, or all undo them, as after a loss; the next attempt is then at the same step.
    """

    def __init__(self, loop: AttemptLoop, step: int, number: int) -> None:
        self._loop = loop
        self.step = step
        """Number of the step, from 0."""
        self.number = number
        """Number of this attempt at the step, from 0."""
        self.committed = False
        """Whether the step is committed; False after an attempt that was undone."""
        self.metrics: dict[str, float] = {}
        """Means of the logged scalars over all microbatches; filled when the loop over the microbatches ends."""
        self.microbatch: int | None = None
        """Microbatch being computed; None outside the loop over the microbatches."""
        self.notes = ScriptNotes()
        self.scalars: dict[int, dict[str, float]] = {}
        """Logged scalars by microbatch."""
        self.outcomes: tuple[Reduced, ...] | None = None
        self.entered = self.left = False
        self.broken = False
        self.num_phases = 0
        self._in_phase = False

    @property
    def _done(self) -> bool:
        return self.committed

    _is_ahead = False
    """Always False: the script makes no calls before the body, because the body may run more than once."""

    @property
    def _place(self) -> tuple[int, int | None]:
        return self.step, self.microbatch

    @property
    def _company(self) -> tuple[int, int] | None:
        """(position, count) of this worker among the body's participants; None outside the body."""
        return self._loop.company(self) if self.entered and not self.left else None

    @property
    def _call(self) -> Callable[[str, bytes], list[bytes]] | None:
        """The function for collective calls in the body; None outside it, where calls go as between any two steps."""
        return self._made if self.entered and not self.left else None

    def _made(self, call: str, data: bytes) -> list[bytes]:
        if self._in_phase or call not in _CALLS:
            raise ConfigError(
                f"job.{call}() "
                + ("in the loop over attempt.microbatches(...)" if self._in_phase else "within `with attempt:`")
                + f": {', '.join(_CALLS)} may be called in the body of an attempt, outside of that loop; the rest after it"
            )
        try:
            return self._loop.call(self, call, data)
        except GroupError:
            self.broken = True
            raise

    def __enter__(self) -> StepAttempt:
        if self.entered:
            raise ConfigError(f"an attempt at step {self.step} was entered twice: take the next one of job.attempts()")
        self.entered = True
        self._loop.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[True] | None:
        self.left = True
        if self.broken or isinstance(error, GroupError):
            self.microbatch = None
            self._loop.interrupted(self)
            return True
        if error is not None:
            return None
        if self._in_phase:
            self.microbatch = None
            raise ConfigError(
                f"step {self.step}: a loop over attempt.microbatches(...) was left before its end:"
                " it must run until it stops by itself"
            )
        self._loop.conclude(self)
        return None

    def microbatches(self, params: Iterable[torch.nn.Parameter] = ()) -> Iterator[Any]:
        """Yield this worker's microbatches, possibly none; afterwards ``p.grad`` is the mean over all microbatches.

        The mean is set for ``params``, on every worker. Each item is the microbatch's data or, in a loop without data, its
        number.
        """
        if not self.entered or self.committed:
            raise ConfigError("attempt.microbatches(...) belongs into `with attempt:`")
        if self._in_phase:
            raise ConfigError("attempt.microbatches(...) within another one: first that has to come to its end")
        self._in_phase = True
        try:
            yield from self._loop.microbatches(self, list(params))
        except GroupError:
            self.broken = True
            raise
        self._in_phase = False

    def carry(self, /, *, reset: bool = False, **initial: Any) -> NoReturn:
        """Refuse: a body may compute a microbatch several times, so CRAFT cannot know which run leaves the value."""
        raise ConfigError(
            "attempt.carry(...): values are carried from step to step by step.carry in job.steps() only; in a loop of your own,"
            " gather what all microbatches leave (job.all_reduce) and keep it in job.register_state(save=..., load=...)"
        )

    def gather(self, tensor: torch.Tensor) -> NoReturn:
        """Refuse: no other worker could run the first pass over this worker's microbatches in the script's body."""
        raise ConfigError(
            "attempt.gather(...): the rows of all microbatches are given by step.gather in job.steps() only; a loss over the"
            " whole batch, with an update by each optimizer, fits into the body of job.steps, too"
        )

    def log(self, /, **scalars: float | torch.Tensor) -> None:
        """Log scalars of this microbatch; ``metrics`` has their mean over all microbatches afterwards."""
        if self.microbatch is None:
            raise ConfigError("attempt.log(...) belongs into the loop over attempt.microbatches(...)")
        self.notes.scalars |= {name: float(value) for name, value in checked("attempt.log", scalars).items()}
