"""Collective calls of a script, outside inner loops: sums, objects, barriers, work for one worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import msgspec
import torch

from craft.protocol.errors import ConfigError
from craft.snapshots.state.raw_memory import DTYPES, memory_of
from craft.worker.loop.pre_loop_calls import PreLoopCalls
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.membership.ft_calls import taking_part
from craft.worker.replica.link import ReplicaLink
from craft.worker.report.activity_page import ActivityPage

R = TypeVar("R")


def gather(place: TrainingLoop | PreLoopCalls, call: str, data: bytes) -> list[bytes]:
    """Gather ``data`` from all workers, outside inner loops; ``call`` is the name that the script knows."""
    if isinstance(place, PreLoopCalls):
        return place.call(call, data)
    current = place.current
    if current is not None and (call_in_body := current._call) is not None and not place.over:
        return call_in_body(call, data)
    parts = place.calls.call(call, data)
    if parts is None:
        raise ConfigError(
            f"job.{call} within the inner loop: workers are at different places there. Call it before or after `for batch in"
            " step`, or after the loop over job.steps; in job.attempts within `with attempt:` or after it"
        )
    return parts


def once(
    place: TrainingLoop | PreLoopCalls,
    activity: ActivityPage,
    name: str,
    fn: Callable[[], R],
    link: ReplicaLink | None = None,
) -> R:
    """Call ``fn`` on one worker, on the next if that one is lost; return the result on every worker."""
    if not isinstance(name, str) or not callable(fn):
        raise ConfigError("job.once(name, fn) takes a name and a function")
    while True:
        own = b""
        if _runs_first(place):
            call = f"job.once({name!r})"
            with activity.paused(call), link.by_one_worker(call) if link is not None else nullcontext():
                own = _encode_result(name, fn())
        found = next((part for part in gather(place, f"once({name!r})", own) if part), None)
        if found is not None:
            result: R = msgspec.msgpack.decode(found, strict=False)
            return result
        # The worker that ran it was lost, so the next one runs it.


def _runs_first(place: TrainingLoop | PreLoopCalls) -> bool:
    """Return whether this worker is the first participant in calls here."""
    if place.behind:
        return not isinstance(place, PreLoopCalls) and place.calls.left_alone()
    if isinstance(place, PreLoopCalls):
        return place.is_first()
    _, position = taking_part(place.participant)
    return position == 0


def _encode_result(name: str, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"job.once({name!r}, fn): fn returned a {type(value).__qualname__}, and its result goes to all workers: it returns"
            f" plain data (numbers, strings, bytes, lists, dicts, None): {error}"
        ) from None


def checkpoint(training: TrainingLoop, tag: str | None) -> None:
    """Take a checkpoint of the present state, on every worker that is current."""
    if training.over:
        raise ConfigError("job.checkpoint() after the loop: the last state has its checkpoint already")
    if training.lifecycle.scheduler is None:
        raise ConfigError(
            "job.checkpoint(): where to? Call job.checkpoints(url) before, or craft run --checkpoints URL"
        )
    training.lifecycle.checkpoint(tag, lambda data: gather(training, "checkpoint", data))


def all_reduce(training: TrainingLoop | PreLoopCalls, tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` over the workers in rank order, in place."""
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
    if isinstance(training, TrainingLoop):
        training.checks.summed(len(parts), training.applied)
    total = _tensor_like(own, parts[0])
    for part in parts[1:]:
        total += _tensor_like(own, part)
    with torch.no_grad():
        tensor.copy_(total)
    return tensor


def _tensor_like(like: torch.Tensor, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape) if data else torch.empty_like(like)


def broadcast_object(training: TrainingLoop | PreLoopCalls, value: Any) -> Any:
    """Return rank 0's ``value`` on every worker: plain data, as MessagePack encodes it (tuples return as lists)."""
    try:
        # Every worker sends its value: if the first is lost, the next one's counts.
        own = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"job.broadcast_object takes plain data (numbers, strings, bytes, lists, dicts, None): {error}"
        ) from None
    return msgspec.msgpack.decode(gather(training, "broadcast_object", own)[0], strict=False)
