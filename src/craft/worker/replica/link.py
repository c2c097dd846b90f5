"""The connections of this worker to the others of its replica, as torch's process groups use them.

A collective is performed while the replica is whole. After the first break, or where the replica is not complete, the answer
depends on what it is for. In a microbatch it is an *echo*: nothing waits, and the microbatch does not count. In an update, and
before the first step, it is the output that a twin recorded: the update is then as whole as any.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import msgspec
import torch

from craft.decide.step.beat import BeatAnswer, BeatMessage
from craft.groups.gloo import GlooGroup
from craft.groups.nccl import NcclGroup
from craft.groups.sharded.operation import TAGS, Operation
from craft.groups.subgroup import DirectSubgroup, StreamedSubgroup, Subgroup
from craft.protocol.errors import ConfigError, GroupBroken, GroupError
from craft.protocol.membership import Generation, GroupProgress, Member
from craft.settings.worker import WorkerSettings
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.group_opening import AnyGroup, mates_of
from craft.worker.replica.recorded_outputs import RecordedOutputs

logger = logging.getLogger(__name__)

Phase = Literal["start", "compute", "update"]

_TO_FIRST, _TO_ALL, _FIRST_GROUP = 0, 1, 8
"""Tags of beats; those of process groups follow."""
_MOST_GROUPS = 1 << 24
_BEAT_BYTES = 64

_encode = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(BeatMessage).decode
_answer = msgspec.msgpack.Decoder(BeatAnswer).decode


class ReplicaLink:
    """Answers the collectives of one worker, for the life of its process."""

    def __init__(
        self,
        settings: WorkerSettings,
        membership: MembershipClient,
        outputs: RecordedOutputs,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``waiting()`` is entered while this worker waits for others: only one that others wait for can be overdue."""
        self.position = settings.position
        self.size = settings.replica_size
        # If late, the others are training already: collectives before the first step have been made.
        self.live = not settings.late
        """Whether the workers of this replica compute and update together."""
        self._spoiled = False
        """Whether a collective of a microbatch was answered by an echo, and its traces are not removed yet."""
        self._worker_id = settings.worker_id
        self._waiting = waiting
        self._membership = membership
        self._outputs = outputs
        self._inner: AnyGroup | None = None
        self._under: Generation | None = None
        self._opened = False
        self._error: GroupError | None = None
        self._phase: Phase = "start"
        self._marks: deque[torch.cuda.Event] = deque()
        """Behind transfers between devices that the host has not waited for."""
        self._tags: dict[int, str] = {}
        """The process group to which a range of tags belongs."""
        self._done: dict[tuple[int, tuple[int, ...]], int] = {}
        """Collectives of this update that gave their outputs, by process group."""
        self._at_ease: Callable[[], bool] = self._twins_may_come
        self._refused = ""
        """The call within which there are no collectives."""
        # Autograd may call from a thread of its device while the main thread waits. Reentrant: taking an output may regroup.
        self._lock = threading.RLock()

    @property
    def whole(self) -> bool:
        """Whether nothing broke in this replica since its group was opened."""
        return self._error is None

    # What a worker does around its steps.

    def loop_begun(self, at_ease: Callable[[], bool]) -> None:
        """Begin a training loop; ``at_ease`` is called while this worker waits for a twin, see ``RecordedOutputs.take``."""
        self._at_ease = at_ease

    def compute(self, *, live: bool) -> None:
        """Begin a microbatch: from here on a broken collective is answered by an echo."""
        self._phase, self.live = "compute", live

    def update(self, branch: int, step: int, *, live: bool, keep: bool) -> None:
        """Begin the update of ``step``: from here on outputs are recorded, or taken from twins."""
        self._phase, self.live = "update", live
        self._done.clear()
        self._outputs.begin_update(branch, step, keep=keep)

    @property
    def progress(self) -> tuple[GroupProgress, ...] | msgspec.UnsetType:
        """How far the update has come that this worker is in, or ended last; UNSET in an inner loop."""
        if self._phase != "update":
            return msgspec.UNSET
        return tuple(GroupProgress(*group, count) for group, count in sorted(self._done.items()))

    @contextmanager
    def scoring(self, *, live: bool) -> Iterator[None]:
        """Answer collectives as in a microbatch within the block, between two collectives of an update."""
        phase, was_live = self._phase, self.live
        self._phase, self.live = "compute", live
        try:
            yield
        finally:
            self._phase, self.live = phase, was_live

    @contextmanager
    def by_one_worker(self, call: str) -> Iterator[None]:
        """Refuse collectives within the block: only this worker runs it."""
        self._refused = call
        try:
            yield
        finally:
            self._refused = ""

    def leave(self, number: int) -> None:
        """End the group of this replica, unless it is that of generation ``number``, which this worker enters."""
        self.live = False
        if self._inner is not None and self._inner.generation != number:
            self._inner.abort()
            self._inner = None

    def enter(self, generation: Generation, inner: AnyGroup | None, *, together: bool) -> None:
        """Use the group of a generation that is settled; ``together``: for the rest of the update that its workers are in."""
        if inner is None or inner is not self._inner:
            self._error = None
            self._marks.clear()
        self._inner, self._under, self._opened = inner, generation, True
        if self._phase == "update":
            self.live = together

    def run(self, group: str, ranks: Sequence[int], operation: Operation) -> None:
        """Answer a collective of the process group ``group``, whose members are at positions ``ranks``."""
        if self._refused:
            raise ConfigError(
                f"{operation.name} between the workers of a replica, in {self._refused}: only one worker runs it, and would wait"
                " for the others for ever. Make the collective before it, on all workers (as full_tensor() of a sharded tensor)"
            )
        with self._lock, torch.no_grad(), self._waiting():
            first_tag = self._first_tag(group)
            if self._phase == "compute":
                if not self._performed(operation, ranks, first_tag):
                    self._spoiled = True
                    operation.echo()
                return
            self._answer_update(operation, ranks, first_tag)

    def _answer_update(self, operation: Operation, ranks: Sequence[int], first_tag: int) -> None:
        """Perform a collective of an update, now or in a later generation, or take what a twin recorded of it."""
        name = self._outputs.next_name()
        # One that broke in the middle may have written into the tensor that it also reads.
        before = [each.clone() for each in operation.outputs] if operation.name == "all_reduce" else []
        while not self._performed(operation, ranks, first_tag):
            for output, kept in zip(operation.outputs, before, strict=bool(before)):
                output.copy_(kept)
            if self._outputs.take(name, operation, self._twins, self._at_ease, lambda: self._is_whole_again):
                break
        self._outputs.record(name, operation)
        if self._phase == "update":
            group = (first_tag, tuple(ranks))
            self._done[group] = self._done.get(group, 0) + 1

    def _twins_may_come(self) -> bool:
        """Return True before the first loop; raise ConfigError if the job begins anew: then no twin has what is waited for."""
        if self._membership.restoration is not None and self._membership.generation is None:
            raise ConfigError(
                "the job begins again from a checkpoint, and its script makes collectives before the first step (as tensor"
                " parallel does when it divides weights), whose results no living worker has: start the job with --resume"
            )
        return True

    @property
    def _is_whole_again(self) -> bool:
        """Whether a collective that broke can be performed after all: the replica is complete, and all wait for it."""
        return self._inner is not None and self.live and self._error is None

    def _first_tag(self, group: str) -> int:
        """Return the first tag of a process group: the same on all its members, in whatever order each first used it."""
        number = zlib.crc32(group.encode()) % _MOST_GROUPS
        if self._tags.setdefault(number, group) != group:
            raise ConfigError(
                f"the process groups {group} and {self._tags[number]} cannot be told apart by their tags: make them in another"
                " order, so that torch gives them other names"
            )
        return _FIRST_GROUP + TAGS * number

    def _performed(self, operation: Operation, ranks: Sequence[int], first_tag: int) -> bool:
        """Perform ``operation``; return False if this replica is not, or no longer, whole."""
        if not self._opened:
            self._open()
        if self._inner is None or not self.live or self._error is not None:
            return False
        try:
            operation.live(self._peers(self._inner, ranks, first_tag))
            if self._phase != "compute":
                # What an update computes from here on must be right, or come from a twin.
                self._await_device(self._inner)
        except GroupError as error:
            self._broke(error)
            return False
        return True

    def _peers(self, inner: AnyGroup, ranks: Sequence[int], first_tag: int) -> Subgroup:
        if isinstance(inner, NcclGroup):
            return StreamedSubgroup(inner, ranks, first_tag, self._marks)
        if inner.direct is not None and len(ranks) == inner.size:
            return DirectSubgroup(inner, inner.direct, ranks, first_tag)
        return Subgroup(inner, ranks, first_tag)

    def _await_device(self, inner: AnyGroup) -> None:
        """Wait until the device has finished all transfers; raise GroupError if it never will, or did so by an abort."""
        if self._marks and isinstance(inner, NcclGroup):
            mark = self._marks[-1]
            self._marks.clear()
            inner.wait_device(mark)

    @property
    def spoiled(self) -> bool:
        """Whether a collective of a microbatch broke, and its traces are not removed yet; waits for the device to know."""
        with self._lock, self._waiting():
            if self._inner is not None and self._error is None and self._marks:
                try:
                    self._await_device(self._inner)
                except GroupError as error:
                    self._broke(error)
                    self._spoiled = True
            return self._spoiled

    def cleaned(self) -> None:
        """Record that the traces of a broken microbatch are removed."""
        self._spoiled = False

    def _open(self) -> None:
        """Use the group of the first generation, before this worker enters it: the script builds its model."""
        self._opened = True
        if self.live:
            self._under, self._inner = self._membership.wait_inner()

    def _broke(self, error: GroupError) -> None:
        """End the group: from here on no collective of this worker succeeds, so that all of the replica notice."""
        assert self._inner is not None and self._under is not None
        self._error = error
        self._inner.abort()
        mates = mates_of(self._under, self._worker_id)
        peer = error.peer if isinstance(error, GroupBroken) and 0 <= error.peer < len(mates) else None
        rank = self._under.rank_of(mates[peer].worker_id) if peer is not None else None
        logger.info("the replica broke: %s", error)
        number = self._under.number
        self._membership.broke(number, GroupBroken(f"replica: {error}", number, -1 if rank is None else rank))

    def _twins(self) -> Sequence[Member]:
        """Return the other workers of this position, in the newest generation."""
        generation = self._membership.generation
        members = generation.members if generation is not None else ()
        return [
            each
            for each in members
            if each.worker_id != self._worker_id
            and isinstance(each.slot, msgspec.Struct)
            and each.slot.position == self.position
        ]

    # The beat.

    def beat(self, message: BeatMessage, decide: Callable[[Sequence[BeatMessage]], BeatAnswer]) -> BeatAnswer | None:
        """Send ``message`` to position 0 and return its answer, the same on all positions; None if the replica broke."""
        with self._lock:
            if self._inner is None or self._error is not None:
                return None
            try:
                return self._lead(message, decide) if self.position == 0 else self._follow(message)
            except GroupError as error:
                self._broke(error)
                return None

    def _lead(self, message: BeatMessage, decide: Callable[[Sequence[BeatMessage]], BeatAnswer]) -> BeatAnswer:
        inner = self._inner
        assert inner is not None
        if isinstance(inner, GlooGroup) and inner.direct is not None:
            answer = decide([message, _message(inner.direct.receive(_TO_FIRST))])
            inner.direct.send(_TO_ALL, tail=_encode(answer))
            return answer
        others = range(1, self.size)
        frames = [torch.empty(_BEAT_BYTES, dtype=torch.uint8) for _ in others]
        due: list[Any] = [inner.recv(frame, peer, _TO_FIRST) for frame, peer in zip(frames, others, strict=True)]
        inner.wait_all(due)
        answer = decide([message, *(_message(_unframed(frame)) for frame in frames)])
        frame = _framed(_encode(answer))
        due = [inner.send(frame, peer, _TO_ALL) for peer in others]
        inner.wait_all(due)
        return answer

    def _follow(self, message: BeatMessage) -> BeatAnswer:
        inner = self._inner
        assert inner is not None
        if isinstance(inner, GlooGroup) and inner.direct is not None:
            inner.direct.send(_TO_FIRST, tail=_encode(message))
            return _answer(inner.direct.receive(_TO_ALL))
        answer = torch.empty(_BEAT_BYTES, dtype=torch.uint8)
        due: list[Any] = [inner.recv(answer, 0, _TO_ALL)]
        due.append(inner.send(_framed(_encode(message)), 0, _TO_FIRST))
        inner.wait_all(due)
        return _answer(_unframed(answer))


class SoloReplica:
    """A replica of one worker: the answer to every collective is its own part."""

    position = 0
    size = 1

    def run(self, group: str, ranks: Sequence[int], operation: Operation) -> None:
        """Answer a collective."""
        with torch.no_grad():
            operation.echo()


def _framed(data: bytes) -> torch.Tensor:
    """Return ``data`` behind its length, in a message of fixed size."""
    frame = bytes([len(data)]) + data
    return torch.frombuffer(bytearray(frame.ljust(_BEAT_BYTES, b"\0")), dtype=torch.uint8)


def _unframed(frame: torch.Tensor) -> bytes:
    data = frame.numpy().tobytes()
    return data[1 : 1 + data[0]]
