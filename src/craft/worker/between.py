"""What a script may ask of all workers together, between the steps: sums, objects, a barrier, an evaluation, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.utils.data import default_collate

from craft.protocol.activity import Phase
from craft.protocol.errors import ConfigError
from craft.snapshots.memory import DTYPES, memory_of
from craft.worker import seeds
from craft.worker.calls import taking_part
from craft.worker.data import Collate
from craft.worker.points import reach
from craft.worker.training import Training

Score = Callable[[Any], Mapping[str, Any]]


class _Scored(msgspec.Struct, frozen=True, array_like=True):
    """What was computed of one batch of an evaluation."""

    batch: int
    size: int
    values: dict[str, float]


def gather(training: Training, call: str, data: bytes) -> list[bytes]:
    """Return everybody's bytes; between two steps only. ``call`` is how the script knows it."""
    current = training.current
    if current is not None and (call_in_body := current._call) is not None:
        return call_in_body(call, data)
    if current is None or not current._done or training.over:
        raise ConfigError(
            "job.evaluate, all_reduce, broadcast_object and barrier belong into the loop over job.steps, after the"
            " inner loop: there all workers are at the same place"
        )
    training.activity.now(Phase.CALLING, training.applied - 1)
    last = training.handover.last
    assert last is not None
    try:
        return training.calls.gather(
            call, data, training.applied, last.under.number, training.behind, training.is_followed
        )
    finally:
        training.activity.now(Phase.UPDATING, training.applied - 1)


def checkpoint(training: Training, tag: str | None) -> None:
    """Take a checkpoint of the state as it is now, on every worker that keeps pace."""
    training.course.checkpoint(tag, lambda data: gather(training, "checkpoint", data))


def all_reduce(training: Training, tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` over the workers, in the order of their ranks, into ``tensor`` itself."""
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.is_sparse
        or str(tensor.dtype).removeprefix("torch.") not in DTYPES
    ):
        raise ConfigError("job.all_reduce(tensor) takes a dense tensor")
    own = tensor.detach().cpu().contiguous()
    parts = gather(training, "all_reduce", memory_of(own).numpy().tobytes())
    for part in parts:
        if len(part) != len(parts[0]):
            raise ConfigError("job.all_reduce: the workers gave tensors of different sizes")
    total = _tensor_like(own, parts[0])
    for part in parts[1:]:
        total += _tensor_like(own, part)
    with torch.no_grad():
        tensor.copy_(total)
    return tensor


def _tensor_like(like: torch.Tensor, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape) if data else torch.empty_like(like)


def broadcast_object(training: Training, value: Any) -> Any:
    """Return rank 0's ``value`` on every worker: plain data, as MessagePack has it (tuples come back as lists)."""
    try:
        # From everybody: whoever is the first may be lost meanwhile, and then the next one's counts.
        own = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"job.broadcast_object takes plain data (numbers, strings, bytes, lists, dicts, None): {error}"
        ) from None
    return msgspec.msgpack.decode(gather(training, "broadcast_object", own)[0], strict=False)


def evaluate(
    training: Training, dataset: Any, score: Score, batch_size: int, collate: Collate | None
) -> dict[str, float]:
    """Share a dataset over the workers, each sample once, and return the mean of what ``score`` gives, by samples."""
    length = _length(dataset, batch_size)
    num_batches = -(-length // batch_size)
    scored: dict[int, _Scored] = {}
    own: dict[int, _Scored] = {}
    buffers = training.buffers_now()
    while len(scored) < num_batches:
        missing = [batch for batch in range(num_batches) if batch not in scored]
        for batch in _share(training, missing):
            if batch not in own:
                training.activity.now(Phase.EVALUATING, microbatch=batch)
                indices = range(batch * batch_size, min(length, (batch + 1) * batch_size))
                own[batch] = _score(training, dataset, score, batch, indices, collate)
                # What a module that is not in eval() makes of its buffers is for that batch alone.
                buffers.restore()
                reach("scored", training.applied)
        parts = gather(training, "evaluate", msgspec.msgpack.encode(list(own.values())))
        for part in parts:
            scored |= {each.batch: each for each in msgspec.msgpack.decode(part, type=list[_Scored])}
    # Who scored what, and how often, must not show in what the script draws next.
    seeds.seed_all(seeds.derive(training.seed, seeds.EVALUATE, training.applied))
    return _mean([scored[batch] for batch in range(num_batches)])


def _share(training: Training, batches: list[int]) -> list[int]:
    """Those of ``batches`` that this worker scores: while it catches up none, unless it is left alone with them."""
    if training.behind:
        return batches if training.calls.left_alone(training.is_followed) else []
    ranks, position = taking_part(training.commitments)
    return batches[position :: len(ranks)]


def _length(dataset: Any, batch_size: int) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"job.evaluate({type(dataset).__qualname__}): a dataset with __getitem__ and __len__ is needed"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"job.evaluate(batch_size={batch_size!r}): batch_size is a whole number of at least 1")
    if len(dataset) == 0:
        raise ConfigError("job.evaluate: the dataset has no samples")
    return len(dataset)


@torch.no_grad()
def _score(
    training: Training, dataset: Any, score: Score, batch: int, indices: Sequence[int], collate: Collate | None
) -> _Scored:
    # So that a score does not depend on who computes it, nor on what was computed before.
    seeds.seed_all(seeds.derive(training.seed, seeds.EVALUATE, training.applied, batch))
    samples = [dataset[index] for index in indices]
    values = score((collate or default_collate)(samples))
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"job.evaluate: the function returned a {type(values).__qualname__}: it returns a dict of numbers, the means"
            " over its batch"
        )
    return _Scored(batch, len(samples), {str(name): float(value) for name, value in values.items()})


def _mean(scored: list[_Scored]) -> dict[str, float]:
    sums: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for each in scored:
        for name, value in each.values.items():
            sums[name] = sums.get(name, 0.0) + value * each.size
            sizes[name] = sizes.get(name, 0) + each.size
    return {name: sums[name] / sizes[name] for name in sums}
