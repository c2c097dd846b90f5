"""Build a source of microbatches from the arguments of ``job.steps``; raise ConfigError for what cannot work."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, default_collate

from craft.protocol.errors import ConfigError
from craft.worker.data.data_split import WHOLE, DataSplit
from craft.worker.data.iterable_reading import Maker, Plan
from craft.worker.data.iterable_source import IterableSource
from craft.worker.data.loader_settings import LoaderSettings, take_over
from craft.worker.data.sample_order import SampleOrder
from craft.worker.data.samplers import BatchOrder, Draws, SampledOrder
from craft.worker.data.sources import Collate, MapSource, Source, StreamSource

logger = logging.getLogger(__name__)

Settings = dict[str, int | float | str | bool | None]

_NO_GLOBAL_BATCH = "job.steps(global_batch=...) is missing: the number of samples in one step, over all workers"


class SourceArgs(NamedTuple):
    """When the job is finished, and how a step is cut into microbatches."""

    microbatches: int
    steps: int | None
    epochs: int | None
    seed: int
    steps_per_epoch: int | None = None
    batch: int | None = None
    samples_per_epoch: int | None = None
    split: DataSplit = WHOLE


Made = tuple[Source, int | None, Settings]


def make_source(
    data: Any,
    *,
    global_batch: int | None,
    microbatches: int,
    steps: int | None,
    epochs: int | None,
    seed: int,
    shuffle: bool | None,
    collate_fn: Collate | None,
    num_workers: int | None,
    steps_per_epoch: int | None = None,
    batch: int | None = None,
    samples_per_epoch: int | None = None,
    split: DataSplit = WHOLE,
) -> Made:
    """Return the source, the number of steps (None: until the data ends), and the settings all workers must share."""
    wanted = SourceArgs(microbatches, steps, epochs, seed, steps_per_epoch, batch, samples_per_epoch, split)
    _check_numbers(wanted, num_workers)
    settings: Settings = {"microbatches": microbatches, "steps": steps, "epochs": epochs, "seed": seed}
    if steps_per_epoch is not None:
        _check_number("steps_per_epoch", steps_per_epoch)
        settings["steps_per_epoch"] = steps_per_epoch
    if is_stream(data):
        if collate_fn is not None or num_workers or shuffle:
            raise ConfigError(
                "job.steps(collate_fn=..., num_workers=..., shuffle=...) with a stream: it gives whole microbatches, in its"
                " order and from any place; leave these out"
            )
        return _stream(data, wanted, settings | {"global_batch": global_batch})
    taken = LoaderSettings(data, collate_fn, num_workers or 0, shuffle, global_batch)
    if isinstance(data, DataLoader):
        taken = take_over(data, taken._replace(num_workers=data.num_workers if num_workers is None else num_workers))
    if isinstance(taken.data, IterableDataset):
        return _iterable(taken, wanted, settings)
    if taken.batch_sampler is not None:
        return _batched(taken, wanted, settings)
    return _mapped(taken, wanted, settings)


def _mapped(taken: LoaderSettings, wanted: SourceArgs, settings: Settings) -> Made:
    """Build the source of a map-style dataset, in CRAFT's order or in that of a sampler of known length."""
    data = taken.data
    num_samples = len(taken.sampler) if taken.sampler is not None else None
    # With microbatches of one size, ``samples_per_epoch`` already leaves out an incomplete last batch.
    drop_last = taken.drop_last and wanted.batch is None
    batch = _check_dataset(data, taken.global_batch, drop_last, wanted, num_samples)
    more: dict[str, Any] = {
        "global_batch": batch,
        "microbatches": wanted.microbatches,
        "seed": wanted.seed,
        "drop_last": drop_last,
        "steps_per_pass": wanted.steps_per_epoch,
        "batch": wanted.batch,
        "samples_per_pass": wanted.samples_per_epoch,
    }
    if wanted.batch is not None:
        settings |= {"batch": wanted.batch, "samples_per_epoch": wanted.samples_per_epoch}
    settings |= {"global_batch": batch, "samples": len(data), "shuffle": taken.shuffle, "drop_last": taken.drop_last}
    if taken.sampler is None:
        order = SampleOrder(length=len(data), shuffle=True if taken.shuffle is None else taken.shuffle, **more)
    else:
        order = SampledOrder(taken.sampler, **more)
        settings |= {"sampler": type(taken.sampler).__qualname__, "drawn": len(taken.sampler)}
    total = wanted.steps if wanted.steps is not None else (wanted.epochs or 0) * order.steps_per_pass
    _check_divides(order, total, wanted.split)
    return _map_source(taken, order, wanted, total), total, settings


def _batched(taken: LoaderSettings, wanted: SourceArgs, settings: Settings) -> Made:
    """Build the source of a map-style dataset, in the batches of a batch sampler."""
    _check_dataset(taken.data, 1, False, wanted)
    draws = Draws(taken.batch_sampler, wanted.seed)
    order = BatchOrder(
        draws, microbatches=wanted.microbatches, epochs=_passes(wanted), steps_per_pass=wanted.steps_per_epoch
    )
    settings |= {"samples": len(taken.data), "sampler": draws.name, "global_batch": taken.global_batch}
    return _map_source(taken, order, wanted, wanted.steps), wanted.steps, settings


def _check_divides(order: SampleOrder, total: int, split: DataSplit) -> None:
    """Raise ConfigError if some microbatch of a pass cannot be divided into equal parts."""
    for step in {0, min(total, order.steps_per_pass) - 1} if split.parts > 1 else ():
        for microbatch in range(order.size_of(step)):
            if (count := order.count(step, microbatch)) % split.parts:
                raise ConfigError(
                    f"microbatch {microbatch} of step {step} has {count} samples, which {split.parts} workers of a replica cannot"
                    f" divide evenly: choose global_batch and microbatches so that each has a multiple of {split.parts} (for the"
                    " last step of a pass: drop_last=True in a DataLoader, or steps_per_epoch)"
                )


def _passes(wanted: SourceArgs) -> int | None:
    """Return the number of passes; None: as many as the steps need."""
    return wanted.epochs if wanted.steps is None else None


def _map_source(
    taken: LoaderSettings, order: SampleOrder | BatchOrder, wanted: SourceArgs, total: int | None
) -> MapSource:
    return MapSource(
        taken.data,
        order,
        seed=wanted.seed,
        total_steps=total,
        collate=taken.collate_fn,
        num_workers=taken.num_workers,
        loader_options=dict(taken.loader_options),
        split=wanted.split,
    )


def _iterable(taken: LoaderSettings, wanted: SourceArgs, settings: Settings) -> Made:
    if taken.shuffle:
        raise ConfigError(
            "job.steps(shuffle=True) with an IterableDataset: its samples come in its own order; shuffle in its __iter__,"
            " from a seed that set_epoch(epoch) changes"
        )
    if wanted.split.parts > 1:
        raise ConfigError(
            "job.steps(IterableDataset) in a sharded replica: the samples of a microbatch cannot be divided between its workers;"
            " give a map-style dataset, or a function stream(microbatch, num_microbatches, start_step)"
        )
    if not taken.item_is_microbatch and taken.global_batch is None:
        raise ConfigError(_NO_GLOBAL_BATCH)
    if taken.item_is_microbatch and taken.global_batch is not None:
        raise ConfigError(
            f"job.steps(global_batch={taken.global_batch}) with a DataLoader that has batch_size=None: each item of its"
            " dataset is a microbatch, and a step has `microbatches` of them; leave global_batch out"
        )
    batch = wanted.microbatches if taken.global_batch is None else taken.global_batch
    _check_number("global_batch", batch)
    if wanted.steps is None and wanted.epochs is None:
        wanted = wanted._replace(epochs=1)
    plan = Plan(
        global_batch=batch,
        microbatches=wanted.microbatches,
        seed=wanted.seed,
        drop_last=taken.drop_last,
        epochs=_passes(wanted),
        steps_per_epoch=wanted.steps_per_epoch,
        snapshot_every=taken.snapshot_every,
    )
    if taken.num_workers > 1:
        logger.info("num_workers=%d: one loader process reads an IterableDataset ahead", taken.num_workers)
    options = {name: value for name, value in taken.loader_options.items() if name != "pin_memory"}
    source = IterableSource(
        taken.data,
        plan,
        Maker(plan, taken.collate_fn or default_collate, taken.item_is_microbatch),
        total_steps=wanted.steps,
        loader_options=options if taken.num_workers else None,
        pins=bool(taken.loader_options.get("pin_memory")),
    )
    settings |= {"global_batch": batch, "drop_last": taken.drop_last, "dataset": type(taken.data).__qualname__}
    if taken.item_is_microbatch:
        settings["whole"] = True
    return source, wanted.steps, settings


def is_stream(data: Any) -> bool:
    """Whether ``data`` is a stream function and not a dataset."""
    return callable(data) and not hasattr(data, "__getitem__") and not isinstance(data, DataLoader | IterableDataset)


def _check_numbers(wanted: SourceArgs, num_workers: int | None) -> None:
    _check_number("microbatches", wanted.microbatches)
    for name, value in (("steps", wanted.steps), ("epochs", wanted.epochs)):
        if value is not None:
            _check_number(name, value)
    if num_workers is not None:
        _check_number("num_workers", num_workers, at_least=0)
    if not isinstance(wanted.seed, int):
        raise ConfigError(f"job.steps(seed={wanted.seed!r}): seed is a whole number")
    if wanted.steps is not None and wanted.epochs is not None:
        raise ConfigError("job.steps(steps=..., epochs=...): give one of them, not both")


def _check_dataset(
    data: Any, global_batch: int | None, drop_last: bool, wanted: SourceArgs, num_samples: int | None = None
) -> int:
    """Return the size of a step; raise ConfigError unless ``data`` is a dataset with enough samples for one.

    ``num_samples``: how many a sampler draws of it.
    """
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ConfigError(
            f"job.steps({type(data).__qualname__}): data is a dataset with __getitem__ and __len__, an"
            " IterableDataset, a DataLoader, or a function"
        )
    if global_batch is None:
        raise ConfigError(_NO_GLOBAL_BATCH)
    _check_number("global_batch", global_batch)
    length = len(data) if num_samples is None else num_samples
    if length == 0 or (drop_last and length < global_batch):
        what = "the dataset has" if num_samples is None else "the sampler draws"
        raise ConfigError(f"{what} {length} samples: not enough for one step of {global_batch}")
    if wanted.steps is None and wanted.epochs is None:
        raise ConfigError("job.steps() needs steps=... or epochs=...: when is the job finished?")
    return global_batch


def _check_number(name: str, value: object, at_least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"job.steps({name}={value!r}): {name} is a whole number of at least {at_least}")


def check_start_step(start_step: object, total_steps: int | None) -> int:
    """Return ``start_step``; raise ConfigError if the job cannot begin there."""
    _check_number("start_step", start_step, at_least=0)
    assert isinstance(start_step, int)
    if total_steps is not None and start_step > total_steps:
        raise ConfigError(
            f"job.steps(start_step={start_step}): the whole job has {total_steps} steps. steps and epochs count from the"
            " beginning of the training, not from start_step"
        )
    return start_step


def _stream(stream: Any, wanted: SourceArgs, settings: Settings) -> Made:
    if wanted.epochs is not None:
        raise ConfigError("job.steps(epochs=...) with a stream: a stream has one pass; leave epochs out, or give steps")
    part, parts, _ = wanted.split
    if parts > 1:
        whole = stream

        def stream(microbatch: int, num_microbatches: int, start_step: int) -> Any:
            """Read this worker's part: each part of a microbatch is a stream."""
            return whole(microbatch * parts + part, num_microbatches * parts, start_step)

    source = StreamSource(stream, microbatches=wanted.microbatches, seed=wanted.seed, total_steps=wanted.steps)
    return source, wanted.steps, settings
