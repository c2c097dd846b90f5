"""Read an ``IterableDataset`` in global batches, pass after pass, the same on every worker.

It runs in the worker, or in its loader process.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from craft.protocol.errors import ConfigError
from craft.snapshots.state.tree import unpack
from craft.worker.data import rng
from craft.worker.data.sample_order import Position, cut

NAME = "the dataset's state_dict()"


class Plan(NamedTuple):
    """How a dataset is read; the same on every worker."""

    global_batch: int
    """Items in a step: samples, or whole microbatches."""
    microbatches: int
    seed: int
    drop_last: bool = False
    """Whether an incomplete global batch at the end of a pass is left out."""
    epochs: int | None = None
    """Number of passes; None: as many as the steps need."""
    steps_per_epoch: int | None = None
    """Most steps in a pass."""
    snapshot_every: int = 1
    """Steps between two snapshots of the dataset's state, counted from the begin of each pass."""


class Batch(NamedTuple):
    """The items of one step."""

    step: int
    epoch: int
    first_step: int
    """First step of its pass."""
    items: list[Any]
    """In the order of the iteration; if ``collated``, one for each microbatch that has samples."""
    size: int
    """Number of items that were read."""
    state: Any = None
    """State of the dataset before they were read; None: not taken."""
    collated: bool = False


def read(dataset: Any, plan: Plan, begin: Position) -> Iterator[Batch]:
    """Yield the batches from ``begin`` to the end of the last pass."""
    epoch, first, step = begin.epoch, begin.first_step, begin.step
    state = unpack(NAME, begin.state) if begin.state else None
    while plan.epochs is None or epoch < plan.epochs:
        items = _open(dataset, epoch, state, plan.seed)
        opened, state = step, None
        while plan.steps_per_epoch is None or step - first < plan.steps_per_epoch:
            due = step > first and (step - first) % plan.snapshot_every == 0
            before = _state_of(dataset, items) if due else None
            # Seed every step: a worker that begins from a state has not drawn what came before.
            rng.seed_all(rng.derive(plan.seed, rng.ITERATE, epoch, step))
            found = list(itertools.islice(items, plan.global_batch))
            if not found or (plan.drop_last and len(found) < plan.global_batch):
                break
            yield Batch(step, epoch, first, found, len(found), before)
            step += 1
            if len(found) < plan.global_batch:
                break
        if step == opened:
            raise ConfigError(_too_short(dataset, epoch, first, step, plan))
        epoch, first = epoch + 1, step


def _too_short(dataset: Any, epoch: int, first: int, step: int, plan: Plan) -> str:
    name = type(dataset).__qualname__
    if step > first:
        return (
            f"{name} gave no sample after load_state_dict, in pass {epoch} at step {step}, where it had given some before:"
            " iterating must go on where state_dict() was called"
        )
    if epoch:
        return (
            f"{name} gave samples in the passes before, and not enough for one step of {plan.global_batch} in pass {epoch}:"
            " its __iter__ must begin anew each time; or give job.steps fewer steps, or epochs=1"
        )
    return f"{name} did not give enough samples for one step of {plan.global_batch}: there is nothing to train on"


def _open(dataset: Any, epoch: int, state: Any, seed: int) -> Any:
    """Begin a pass, or continue it from ``state``."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    rng.seed_all(rng.derive(seed, rng.ITERATE, epoch))
    if state is not None and "dataset" in state:
        dataset.load_state_dict(state["dataset"])
    items: Any = iter(dataset)
    if state is not None and "iterator" in state:
        items.load_state_dict(state["iterator"])
    return items


def is_stateful(item: Any) -> bool:
    """Whether ``item`` can save and load its place in an iteration."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _state_of(dataset: Any, items: Any) -> dict[str, Any] | None:
    """Return the place of the iteration; None: the dataset cannot save it."""
    found: dict[str, Any] = {}
    if is_stateful(items):
        found["iterator"] = items.state_dict()
    if is_stateful(dataset) and items is not dataset:
        found["dataset"] = dataset.state_dict()
    # A copy: the dataset may change what it returned.
    return copy.deepcopy(found) or None


class ReadAhead(IterableDataset[Batch]):
    """Reads and collates every microbatch in a loader process: after a loss, any of them may be needed."""

    def __init__(self, dataset: Any, plan: Plan, begin: Position, make: Callable[[Batch, int], Any]) -> None:
        self._dataset = dataset
        self._plan = plan
        self._begin = begin
        self._make = make

    def __iter__(self) -> Iterator[Batch]:
        for batch in read(self._dataset, self._plan, self._begin):
            filled = min(batch.size, self._plan.microbatches)
            yield batch._replace(items=[self._make(batch, each) for each in range(filled)], collated=True)


class Maker:
    """Makes the data of a microbatch from the items of its step."""

    def __init__(self, plan: Plan, collate: Callable[[Any], Any], item_is_microbatch: bool) -> None:
        self._plan = plan
        self._collate = collate
        self._item_is_microbatch = item_is_microbatch

    def __call__(self, batch: Batch, microbatch: int) -> Any:
        rng.seed_all(rng.derive(self._plan.seed, rng.DATA, batch.step, microbatch))
        if self._item_is_microbatch:
            return self._collate(batch.items[microbatch])
        begin, count = cut(batch.size, self._plan.microbatches, microbatch)
        return self._collate(batch.items[begin : begin + count])
