"""The exchange of one step: gradients in, their mean out.

Input: flushed buckets, one by one during backward, then this worker's control word. Output: the whole result (every chunk, the
buffers, the combined word), once every member has acknowledged that it has it too.

The exchange thread exchanges buckets that are ready before backward ends. The main thread exchanges the last bucket, the word and
the acknowledgement: it is idle then, and handing over would cost more than it saves.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from craft.groups.group import P2P, Pending
from craft.protocol.control_word import Carried, Combined, Word
from craft.protocol.errors import GroupError, LeftBehind
from craft.protocol.membership import Generation
from craft.telemetry.fault_points import reach
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.routes.flat import FlatRoute

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Word).decode


class Attempt:
    """One attempt at exchanging a step under one generation. Owned by the main thread; the exchange thread runs ``overlap``."""

    def __init__(
        self,
        step: int,
        group: P2P | None,
        route: FlatRoute,
        gradients: GradientAccumulator,
        result: Flats,
        buffers_like: Callable[[tuple[int, ...]], torch.Tensor],
        under: Generation | None = None,
        plan: tuple[str | None, ...] = (),
    ) -> None:
        """``buffers_like`` allocates memory for the buffers with these numbers; ``under`` is the exchange's generation.

        ``plan``: the worker that computes each microbatch; None for one that is dropped.
        """
        self.step = step
        self.group = group
        self.result = result
        self.under = under
        self.plan = plan
        self.combined: Combined | None = None
        self.buffers: torch.Tensor | None = None
        """The owner of microbatch 0 fills it before it finishes; on the others the exchange does."""
        self.carried: dict[int, torch.Tensor] = {}
        """By rank: values for the next step. This worker's are set before ``finish``, the others' are received."""
        self._told: list[Pending] = []
        """Sends to followers at the beginning; kept until the attempt ends."""
        self.reductions: tuple[Any, ...] = ()
        """In ``job.attempts``, on a worker that only follows: the others' reductions in this step."""
        self.complete = False
        """Whether the whole result is here; set before it is acknowledged."""
        self.error: GroupError | None = None
        self.bug: Exception | None = None
        """Any other error on the exchange thread; the main thread raises it."""
        self._buffers_like = buffers_like
        self._route = route
        self._gradients = gradients
        self._next = 0
        """The next bucket to exchange; they go in order, so that all members wait for the same ones."""
        self._posted = False
        self.begun = False
        """Whether any held data was sent."""
        self._ready: set[int] = set()
        route.begin()

    @property
    def usable(self) -> bool:
        """Whether the whole result is here and may be committed."""
        word = self.combined
        return self.complete and word is not None and not (word.resend or word.differs)

    def tell(self, send: Callable[[], list[Pending]]) -> None:
        """Send to followers with ``send``, before anything else; a follower may be gone already, as any member may later."""
        try:
            self._told = send()
        except GroupError as error:
            self.error = _bare(error)

    def overlap(self, bucket: int) -> None:
        """Exchange a ready bucket, and those that waited for it; on the exchange thread."""
        self._ready.add(bucket)
        while self._next in self._ready and self.error is None and self.bug is None:
            try:
                self._exchange_bucket()
            except GroupError as error:
                self.error = _bare(error)

    def finish(self, word: Callable[[], Word]) -> bool:
        """Exchange the rest and send ``word()``; return True if every member acknowledged the whole result."""
        if self.bug is not None:
            raise self.bug
        try:
            if self.error is None:
                self._finish(word)
        except GroupError as error:
            self.error = _bare(error)
        return self.error is None

    def _finish(self, word_of_now: Callable[[], Word]) -> None:
        while self._next < len(self.result.tensors) - 1:
            self._exchange_bucket()
        word = word_of_now()
        data = _encode(word)
        # The word goes right behind the last blocks: it arrives in the same wake-up.
        self._exchange_bucket(lambda: self._route.send_word(data))
        words = [_decode(frame) for frame in self._route.words(data)]
        if word.rewinds < max(each.rewinds for each in words):
            raise LeftBehind("the job went back to a checkpoint while this worker joined: another one will come")
        self.combined = self._route.combine(words)
        if self.combined.buffers and self.group is not None:
            if self.combined.buffers_from != self.group.rank:
                self.buffers = self._buffers_like(self.combined.buffers)
            assert self.buffers is not None
            self._route.share_buffers(self.buffers, self.combined.buffers_from)
        if self.combined.carried:
            self._share_carried(self.combined.carried)
        self._route.wait_results(self.result.tensors)
        self.complete = True
        reach("before_acknowledge", self.step)
        self._route.acknowledge(lambda: reach("acknowledging", self.step))

    def _share_carried(self, carried: Sequence[Carried]) -> None:
        if self.group is None:
            return
        sizes: dict[int, int] = {}
        for each in carried:
            sizes[each.rank] = sizes.get(each.rank, 0) + each.nbytes
        for rank, size in sizes.items():
            if rank != self.group.rank:
                self.carried[rank] = torch.empty(size, dtype=torch.uint8)
        self._route.share_carried(self.carried)

    def _exchange_bucket(self, then_send: Callable[[], None] | None = None) -> None:
        if not self._posted:
            # Not earlier: each receive notifies the peer, and would wake a thread of a member that computes.
            self._posted = True
            self._route.post(self.result.tensors)
        bucket = self._next
        if bucket < len(self.result.tensors):
            self.begun = True
            self._route.send_blocks(bucket, self._gradients)
        if then_send is not None:
            then_send()
        if bucket >= len(self.result.tensors):
            return
        reach("blocks_sent", self.step)
        self._route.reduce(bucket, self._gradients, self.result.tensors)
        self._route.send_result(bucket, self.result.tensors, self.step)
        reach("result_sent", self.step)
        self._next += 1


class ExchangeThread:
    """Exchanges buckets while the main thread is in backward."""

    def __init__(self, on_error: Callable[[int, GroupError], None]) -> None:
        self._work: queue.SimpleQueue[tuple[Attempt, int] | threading.Event | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._idle = True
        """Whether the main thread gave no work since it last waited; only the main thread reads it."""
        self._thread = threading.Thread(target=self._loop, name="craft-exchange", daemon=True)
        self._thread.start()

    def give(self, attempt: Attempt, bucket: int) -> None:
        """Queue a bucket that is ready during backward."""
        self._idle = False
        self._work.put((attempt, bucket))

    def wait(self) -> None:
        """Wait until the thread has finished its work; then only the main thread uses the attempt."""
        if self._idle:
            return
        done = threading.Event()
        self._work.put(done)
        done.wait()
        self._idle = True

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            attempt, bucket = item
            try:
                attempt.overlap(bucket)
            except Exception as error:  # noqa: BLE001  (the edge of a thread: the main thread raises it)
                attempt.bug = error
            if attempt.group is not None and attempt.error is not None:
                self._on_error(attempt.group.generation, attempt.error)
            # While this thread waits for the next item, it must not keep this attempt, and its group, alive.
            del item, attempt


def _bare(error: GroupError) -> GroupError:
    """Return ``error`` without its frames, through which it would keep the attempt and its group alive.

    The group's sockets and threads would then last until the garbage collector visits old objects, which is rare.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
