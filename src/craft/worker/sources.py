"""From the arguments of ``job.steps`` to a source of microbatches; what cannot work is refused with a sentence."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from craft.protocol.errors import ConfigError
from craft.worker.data import Collate, MapSource, Source, StreamSource
from craft.worker.order import Order

Settings = dict[str, int | float | str | bool | None]


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
) -> tuple[Source, int | None, Settings]:
    """Return the source, the number of steps (None: until the streams end), and the settings all workers must share."""
    _check_numbers(microbatches, steps, epochs, num_workers, seed)
    settings: Settings = {"microbatches": microbatches, "steps": steps, "epochs": epochs, "seed": seed}
    if isinstance(data, IterableDataset):
        raise ConfigError(
            "an IterableDataset has no samples by number: pass a function stream(microbatch, num_microbatches, start_step)"
            " that returns an iterator over the batches of one microbatch"
        )
    if is_stream(data):
        if collate_fn is not None or num_workers or shuffle:
            raise ConfigError(
                "job.steps(collate_fn=..., num_workers=..., shuffle=...) with a stream: it gives whole microbatches, in its"
                " own order and from where it likes; leave these out"
            )
        return _stream(data, microbatches, steps, epochs, seed, global_batch, settings)
    options: dict[str, Any] = {}
    drop_last = False
    if isinstance(data, DataLoader):
        data, collate_fn, num_workers, shuffle, global_batch, drop_last, options = _take_over(
            data, collate_fn, num_workers, shuffle, global_batch
        )
    batch = _check_dataset(data, global_batch, drop_last, steps, epochs)
    order = Order(
        length=len(data),
        global_batch=batch,
        microbatches=microbatches,
        seed=seed,
        shuffle=True if shuffle is None else shuffle,
        drop_last=drop_last,
        steps_per_pass=steps_per_epoch,
    )
    total = steps if steps is not None else (epochs or 0) * order.steps_per_pass
    settings |= {"global_batch": batch, "samples": len(data), "shuffle": shuffle, "drop_last": drop_last}
    if steps_per_epoch is not None:
        _check_number("steps_per_epoch", steps_per_epoch)
        settings["steps_per_epoch"] = steps_per_epoch
    source = MapSource(
        data,
        order,
        seed=seed,
        total_steps=total,
        collate=collate_fn,
        num_workers=num_workers or 0,
        loader_options=options,
    )
    return source, total, settings


def is_stream(data: Any) -> bool:
    """Whether ``data`` is a function that gives the batches of a microbatch, and not a dataset."""
    return callable(data) and not hasattr(data, "__getitem__") and not isinstance(data, DataLoader)


def _check_numbers(
    microbatches: int, steps: int | None, epochs: int | None, num_workers: int | None, seed: int
) -> None:
    _check_number("microbatches", microbatches)
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None:
            _check_number(name, value)
    if num_workers is not None:
        _check_number("num_workers", num_workers, at_least=0)
    if not isinstance(seed, int):
        raise ConfigError(f"job.steps(seed={seed!r}): seed is a whole number")
    if steps is not None and epochs is not None:
        raise ConfigError("job.steps(steps=..., epochs=...): give one of them, not both")


def _check_dataset(data: Any, global_batch: int | None, drop_last: bool, steps: int | None, epochs: int | None) -> int:
    """Raise ConfigError unless ``data`` is a dataset that is enough for a step; return the size of a step."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ConfigError(
            f"job.steps({type(data).__qualname__}): data is a dataset with __getitem__ and __len__, a DataLoader, or a function"
        )
    if global_batch is None:
        raise ConfigError("job.steps(global_batch=...) is missing: the number of samples in one step, over all workers")
    _check_number("global_batch", global_batch)
    if len(data) == 0 or (drop_last and len(data) < global_batch):
        raise ConfigError(f"the dataset has {len(data)} samples: not enough for one step of {global_batch}")
    if steps is None and epochs is None:
        raise ConfigError("job.steps() needs steps=... or epochs=...: when is the job finished?")
    return global_batch


def _check_number(name: str, value: object, at_least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"job.steps({name}={value!r}): {name} is a whole number of at least {at_least}")


def _stream(
    stream: Any,
    microbatches: int,
    steps: int | None,
    epochs: int | None,
    seed: int,
    global_batch: int | None,
    settings: Settings,
) -> tuple[Source, int | None, Settings]:
    if epochs is not None:
        raise ConfigError("job.steps(epochs=...) with a stream: a stream has one pass; leave epochs out, or give steps")
    source = StreamSource(stream, microbatches=microbatches, seed=seed, total_steps=steps)
    return source, steps, settings | {"global_batch": global_batch}


def _take_over(
    loader: DataLoader[Any],
    collate_fn: Collate | None,
    num_workers: int | None,
    shuffle: bool | None,
    global_batch: int | None,
) -> tuple[Any, Collate | None, int, bool, int | None, bool, dict[str, Any]]:
    """What a DataLoader was built with, used for microbatches instead of its own batches."""
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError("the DataLoader has an IterableDataset: pass a function stream(...) instead, see job.steps")
    batches = _batches(loader)
    if shuffle is None:
        shuffle = _shuffles(batches.sampler, len(loader.dataset))  # type: ignore[arg-type]
    workers = loader.num_workers if num_workers is None else num_workers
    options: dict[str, Any] = {"pin_memory": loader.pin_memory}
    if workers > 0:
        options |= {
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
        }
    batch = global_batch if global_batch is not None else batches.batch_size
    return loader.dataset, collate_fn or loader.collate_fn, workers, shuffle, batch, batches.drop_last, options


def _batches(loader: DataLoader[Any]) -> BatchSampler:
    """How the loader makes batches; given by its arguments, or as a batch sampler."""
    if loader.batch_sampler is None:
        raise ConfigError(
            "the DataLoader has batch_size=None, so that its dataset gives whole batches: pass a dataset of single samples,"
            " or a function stream(...), see job.steps"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(_unknown_order(loader.batch_sampler))
    return loader.batch_sampler


def _shuffles(sampler: object, length: int) -> bool:
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == length:
        return True
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    raise ConfigError(_unknown_order(sampler))


def _unknown_order(sampler: object) -> str:
    return (
        f"the DataLoader has a {type(sampler).__qualname__}, whose order CRAFT cannot take over: pass its dataset to"
        " job.steps, with shuffle=True or shuffle=False (torch.utils.data.Subset leaves samples out)"
    )
