"""The exchange of one step: gradients in, their mean out, on a thread of its own.

Enters: flushed buckets, one by one while backward goes on, then this worker's control word. Leaves: the whole result (every
chunk, the buffers, the combined word), once every member has acknowledged that it has it too. The main thread starts an
``Attempt``, feeds it, and waits for its outcome; nothing else is shared.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import msgspec
import torch

from craft.decide.word import combine
from craft.groups.group import Group
from craft.protocol.errors import GroupError
from craft.protocol.word import Combined, Word
from craft.worker.gather import gather_framed
from craft.worker.gradients import Gradients
from craft.worker.points import reach
from craft.worker.route import Route

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Word).decode


class Attempt:
    """One try at exchanging a step under one generation.

    The main thread calls ``flushed`` and ``speak`` (or ``cancel``), then ``outcome``. The exchange thread calls ``run``.
    """

    def __init__(
        self, step: int, group: Group | None, route: Route, gradients: Gradients, result: list[torch.Tensor]
    ) -> None:
        self.step = step
        self.group = group
        self.route = route
        self.result = result
        self.plan: tuple[str | None, ...] = ()
        """Who computes which microbatch, by worker; None for one that is dropped."""
        self.combined: Combined | None = None
        self.buffers: torch.Tensor | None = None
        """Filled by the owner of microbatch 0 before it speaks; by the exchange for all others."""
        self.complete = False
        """The whole result is here; set before it is acknowledged."""
        self.error: Exception | None = None
        self.frame_bytes = 1024
        self.buffers_like: Callable[[tuple[int, ...]], torch.Tensor] = lambda _: torch.empty(0)
        self._gradients = gradients
        self._inbox: queue.SimpleQueue[int | Word | None] = queue.SimpleQueue()
        self._word: Word | None = None
        self._over = threading.Event()

    def flushed(self, bucket: int) -> None:
        """A bucket of this worker's last microbatch is ready."""
        self._inbox.put(bucket)

    def speak(self, word: Word) -> None:
        """The inner loop is over: everything not flushed yet is ready, and this is what there is to say."""
        self._inbox.put(word)

    def cancel(self) -> None:
        """Give up: a newer generation is there."""
        self._inbox.put(None)

    def outcome(self) -> bool:
        """Wait for the end; True if every member has acknowledged the result."""
        self._over.wait()
        return self.complete and self.error is None

    def run(self) -> None:
        """Exchange everything; on the exchange thread."""
        try:
            self._run()
        except GroupError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001  (the edge of a thread: the main thread raises it)
            self.error = error
        finally:
            self._over.set()
        # Off the critical path: after everybody's acknowledgement all is done; after an error, all ends with one.
        self.route.drain()

    def _run(self) -> None:
        self.route.post(self.result)
        flushed = 0
        for bucket in range(len(self.result)):
            while self._word is None and not flushed & (1 << bucket):
                item = self._inbox.get()
                if item is None:
                    raise _Cancelled
                if isinstance(item, Word):
                    self._word = item
                else:
                    flushed |= 1 << item
            self._exchange_bucket(bucket)
        while self._word is None:
            item = self._inbox.get()
            if item is None:
                raise _Cancelled
            if isinstance(item, Word):
                self._word = item
        self._exchange_word(self._word)
        self._acknowledge()

    def _exchange_bucket(self, bucket: int) -> None:
        self.route.send_blocks(bucket, self._gradients)
        reach("blocks_sent", self.step)
        self.route.reduce(bucket, self._gradients, self.result)
        self.route.send_result(bucket, self.result)
        reach("result_sent", self.step)

    def _exchange_word(self, word: Word) -> None:
        frames = gather_framed(self.group, _encode(word), self.frame_bytes)
        self.combined = combine([_decode(frame) for frame in frames])
        if self.combined.buffers and self.group is not None:
            if self.combined.buffers_from != self.group.rank:
                self.buffers = self.buffers_like(self.combined.buffers)
            assert self.buffers is not None
            self.route.share_buffers(self.buffers, self.combined.buffers_from)
        self.route.wait_results()

    def _acknowledge(self) -> None:
        """Everybody who calls this has the whole result; it returns once everybody has called it."""
        self.complete = True
        reach("before_acknowledge", self.step)
        if self.group is None:
            return
        pending = self.group.all_reduce(torch.zeros(1))
        reach("acknowledging", self.step)
        pending.wait()


class _Cancelled(GroupError):
    def __init__(self) -> None:
        super().__init__("a newer generation is there")


class ExchangeThread:
    """Runs attempts, one after the other."""

    def __init__(self, on_error: Callable[[Attempt], None]) -> None:
        self._attempts: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._thread = threading.Thread(target=self._loop, name="craft-exchange", daemon=True)
        self._thread.start()

    def start(self, attempt: Attempt) -> None:
        self._attempts.put(attempt)

    def stop(self) -> None:
        self._attempts.put(None)
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        while (attempt := self._attempts.get()) is not None:
            attempt.run()
            if attempt.error is not None:
                self._on_error(attempt)
