"""Take over the settings of a ``DataLoader`` for microbatches, in place of its batches."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from craft.protocol.errors import ConfigError
from craft.worker.data.samplers import Chunked
from craft.worker.data.sources import Collate


class LoaderSettings(NamedTuple):
    """The arguments of ``job.steps``, completed by the settings of a ``DataLoader``."""

    data: Any
    collate_fn: Collate | None
    num_workers: int
    shuffle: bool | None
    global_batch: int | None
    drop_last: bool = False
    loader_options: Mapping[str, Any] = MappingProxyType({})
    """Options of the loader processes."""
    sampler: Any = None
    """Draws single samples; None: by ``shuffle``."""
    batch_sampler: Any = None
    """Draws global batches."""
    item_is_microbatch: bool = False
    """Whether an item of the data is already a microbatch."""
    snapshot_every: int = 1


def take_over(loader: DataLoader[Any], given: LoaderSettings) -> LoaderSettings:
    """Complete ``given``, which takes precedence, by the settings of ``loader``."""
    if getattr(loader, "next_iter_state", None) is not None:
        raise ConfigError(
            f"load_state_dict was called on the {type(loader).__qualname__} that job.steps got: CRAFT keeps the place in the"
            " data itself. Leave that call out, and give job.steps(start_step=N) the number of steps done so far"
        )
    options: dict[str, Any] = {"pin_memory": loader.pin_memory}
    if given.num_workers > 0:
        options |= {
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
        }
    collate = given.collate_fn or loader.collate_fn
    taken = given._replace(data=loader.dataset, collate_fn=collate, loader_options=options)
    if isinstance(loader.dataset, IterableDataset):
        return taken._replace(
            global_batch=given.global_batch if given.global_batch is not None else loader.batch_size,
            drop_last=loader.drop_last,
            item_is_microbatch=loader.batch_size is None,
            snapshot_every=max(1, getattr(loader, "snapshot_every_n_steps", None) or 1),
        )
    return _take_over_order(loader, taken)


def _take_over_order(loader: DataLoader[Any], taken: LoaderSettings) -> LoaderSettings:
    """Take over the order in which a loader draws the samples of a map-style dataset."""
    batches = loader.batch_sampler
    if batches is None:
        raise ConfigError(
            "the DataLoader has batch_size=None, so that its dataset gives whole batches: pass a dataset of single samples,"
            " or a function stream(...), see job.steps"
        )
    if type(batches) is not BatchSampler:
        if taken.global_batch is not None or taken.shuffle is not None:
            raise ConfigError(
                f"the DataLoader has a {type(batches).__qualname__}, whose batches are the global batches: leave global_batch"
                " and shuffle out"
            )
        return taken._replace(batch_sampler=batches)
    size = taken.global_batch if taken.global_batch is not None else batches.batch_size
    taken = taken._replace(global_batch=size, drop_last=batches.drop_last)
    if taken.shuffle is not None:
        return taken
    sampler = batches.sampler
    if (shuffles := _shuffles(sampler, len(loader.dataset))) is not None:  # type: ignore[arg-type]
        return taken._replace(shuffle=shuffles)
    if hasattr(sampler, "__len__"):
        return taken._replace(sampler=sampler)
    return taken._replace(batch_sampler=Chunked(sampler, size, batches.drop_last))


def _shuffles(sampler: object, length: int) -> bool | None:
    """Whether a sampler of the whole dataset shuffles; None: another kind of sampler."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return True
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return None


def samples_in_pass(loader: DataLoader[Any]) -> int:
    """Return the samples in a pass over a map-style dataset, in the order that is taken over from ``loader``."""
    length = len(loader.dataset)  # type: ignore[arg-type]
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if sampler is None or _shuffles(sampler, length) is not None or not hasattr(sampler, "__len__"):
        return length
    return len(sampler)
