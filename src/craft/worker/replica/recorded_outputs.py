"""Outputs of collectives that other workers of the same position can take over.

Twins have the same shards and run the same code, so that a collective of an update gives the same bits in every replica. Each
worker records what its collectives gave, under their numbers. A worker whose replica broke, or is not complete, takes these
outputs from a twin: it runs the same update without its replica. Outputs before the first step are kept for late workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from craft.groups.sharded.operation import Operation
from craft.protocol.errors import ConfigError, LeftBehind, SnapshotError, Unreachable
from craft.protocol.membership import Member
from craft.snapshots.state.leaves import tensor_bytes
from craft.snapshots.state.raw_memory import DTYPES
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import recall

_MOST_BYTES = 1 << 28
"""Of one update: more than this is not recorded."""
_MOST_START_BYTES = 1 << 20
"""Of one collective before the first step. Larger ones carry weights, which late workers take with the state."""
_SLICE_S = 0.5
"""How long one twin is asked before the next one."""
_LIMIT_S = 60.0
_KEPT_STEPS = 2


class RecordedOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one collective gave."""

    operation: str
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    """Type and shape of each output."""
    data: tuple[bytes, ...] | None
    """None: too large to be recorded."""


_decode = msgspec.msgpack.Decoder(RecordedOutput).decode


class RecordedOutputs:
    """Records the outputs of this worker's collectives, and takes those of its twins. Owned by the main thread."""

    def __init__(self, donor: Donor | None, key: bytes) -> None:
        """``key`` is the job's; without a donor there are no twins."""
        self._donor = donor
        self._key = key
        self._place = "start"
        self._number = 0
        self._bytes = 0
        self._steps: list[tuple[int, list[str]]] = []
        """The names of what was recorded in the last updates."""

    def begin_update(self, branch: int, step: int, *, keep: bool) -> None:
        """Number the collectives of the update of ``step``; ``keep``: a worker that catches up may need older ones."""
        self._place, self._number, self._bytes = f"update{branch}.{step}", 0, 0
        self._steps.append((step, []))
        while not keep and len(self._steps) > _KEPT_STEPS:
            _, names = self._steps.pop(0)
            if self._donor is not None:
                self._donor.drop(names)

    def next_name(self) -> str:
        """Return the name of the next collective."""
        self._number += 1
        return f"{self._place}/{self._number - 1}"

    def record(self, name: str, operation: Operation) -> None:
        """Record what a collective gave."""
        if self._donor is None:
            return
        size = sum(each.nbytes for each in operation.outputs)
        self._bytes += size
        fits = self._bytes <= _MOST_BYTES if self._steps else size <= _MOST_START_BYTES
        data = tuple(bytes(tensor_bytes(each)) for each in operation.outputs) if fits else None
        self._donor.keep(name, msgspec.msgpack.encode(RecordedOutput(operation.name, _kinds(operation), data)))
        if self._steps:
            self._steps[-1][1].append(name)

    def take(
        self,
        name: str,
        operation: Operation,
        twins: Callable[[], Sequence[Member]],
        at_ease: Callable[[], bool],
        can_perform: Callable[[], bool],
    ) -> bool:
        """Fill the outputs of ``operation`` with what a twin recorded under ``name``; wait until one has.

        ``at_ease()`` is called again and again: it does what else is due, and returns False if the twins have changed. Returns
        False without an output as soon as ``can_perform()``. Raises LeftBehind if no twin has it.
        """
        deadline, asked = time.monotonic() + _LIMIT_S, 0
        while time.monotonic() < deadline:
            members = twins() if at_ease() else ()
            if can_perform():
                return False
            if not members:
                time.sleep(_SLICE_S / 10)
                continue
            found = self._ask(members[asked % len(members)], name, at_ease)
            asked += 1
            if found is not None:
                self._fill(name, operation, found)
                return True
        raise LeftBehind(
            f"no worker of this position has the output of {operation.name} ({name}), which this worker could not compute without"
            " its replica: another one will come"
        )

    def _ask(self, member: Member, name: str, at_ease: Callable[[], bool]) -> RecordedOutput | None:
        until = time.monotonic() + _SLICE_S
        try:
            data = recall(
                (member.address, member.state_port),
                name,
                self._key,
                lambda: time.monotonic() > until or not at_ease(),
                _LIMIT_S,
            )
        except (SnapshotError, Unreachable):
            return None
        return _decode(data)

    def _fill(self, name: str, operation: Operation, found: RecordedOutput) -> None:
        if found.operation != operation.name or found.kinds != _kinds(operation):
            raise ConfigError(
                f"a worker of the same position made the call {found.operation}{list(found.kinds)} where this one makes"
                f" {operation.name}{list(_kinds(operation))} ({name}): every replica has to run the same code"
            )
        if found.data is None and name.startswith("start/"):
            operation.echo()
            return
        if found.data is None:
            raise LeftBehind(
                f"the outputs of this update are larger than {_MOST_BYTES >> 20} MiB ({name}), and are not recorded for workers"
                " without their replica: another one will come"
            )
        for output, (dtype, shape), data in zip(operation.outputs, found.kinds, found.data, strict=True):
            if data:
                output.copy_(torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(shape))


def _kinds(operation: Operation) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in operation.outputs)
