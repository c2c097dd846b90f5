"""The NCCL group: tensors on devices by NCCL, everything else (words, acknowledgements, claims) by a Gloo group beside it.

Gloo's connections also tell of a peer's death, of which NCCL says nothing. What NCCL is given runs on a stream of the group's
own. No other stream ever waits for that one: the main thread asks the device whether an exchange has ended, and can give up
asking. So an exchange that hangs blocks nothing but its own stream, until the abort ends it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from craft.groups.gloo import GlooGroup
from craft.groups.group import EXIT_NOT_FREED, Parcels, Pending
from craft.groups.nccl_calls import Communicator, NcclError
from craft.protocol.errors import GroupAborted, GroupBroken, GroupError

logger = logging.getLogger(__name__)

_LOOK_S = 20e-6
"""The device is asked again after this long; the kernel makes some 70 microseconds of it."""
_LOOK_FOR_ERRORS_S = 0.1
_ABORT_LIMIT_S = 10.0
"""An abort that takes longer never returns: the device does not answer, and nothing in this process can change that."""


class NcclGroup:
    """One generation's connections between devices."""

    def __init__(self, gloo: GlooGroup, device: torch.device, identity: bytes) -> None:
        """Connect the devices of the members of ``gloo``, which all have the same ``identity`` from one of them.

        Blocks until all are here, for ever if one dies meanwhile: on a thread that can be left behind. Raises GroupError.
        """
        self.generation = gloo.generation
        self.rank = gloo.rank
        self.size = gloo.size
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._gloo = gloo
        # Guards the flag: abort() may be called by any thread.
        self._lock = threading.Lock()
        self._aborted = False
        try:
            self._communicator = Communicator(identity, self.rank, self.size, device)
        except NcclError as error:
            raise GroupBroken(f"generation {self.generation} did not meet: {error}", self.generation) from error
        try:
            self._greet()
        except GroupError:
            self.abort()
            raise

    def _greet(self) -> None:
        """NCCL connects two ranks when they first have something for each other: now, not in the middle of a step."""
        with torch.cuda.stream(self.stream):
            signals = torch.zeros(self.size, 16, dtype=torch.uint8, device=self.device)
            others = [rank for rank in range(self.size) if rank != self.rank]
            self.swap([(signals[self.rank], rank) for rank in others], [(signals[rank], rank) for rank in others])
        self.wait_device(self.mark())

    # Between devices.

    def swap(self, sends: Parcels, receives: Parcels) -> None:
        """Put sends and receives on the group's stream; those who have something for each other make their calls in one order."""
        if self._aborted:
            raise self._gone()
        try:
            self._communicator.swap(sends, receives, self.stream)
        except NcclError as error:
            raise self._broken(error) from error

    def mark(self) -> torch.cuda.Event:
        """A mark behind everything that the group's stream has been given so far."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait_device(self, mark: torch.cuda.Event) -> None:
        """Block until the stream has come to ``mark``; raise GroupError if it never will, or not with what was sent.

        An abort lets the stream go on, over whatever was half received: whether there was one is looked at afterwards.
        """
        look = time.monotonic() + _LOOK_FOR_ERRORS_S
        while not mark.query():
            self._check()
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_FOR_ERRORS_S
                self._check_device()
            time.sleep(_LOOK_S)
        self._check()

    def _check(self) -> None:
        if self._aborted:
            raise self._gone()
        over = self._gloo.over
        if over is not None:
            raise over.with_traceback(None)

    def _check_device(self) -> None:
        problem = self._communicator.error()
        if problem is not None and not self._aborted:
            raise self._broken(problem)

    # Everything else.

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._gloo.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._gloo.recv(tensor, peer, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._gloo.all_reduce(tensor)

    def wait_all(self, pending: Sequence[Any]) -> None:
        self._gloo.wait_all(pending)

    def cut_one(self) -> bool:
        """As ``GlooGroup.cut_one``."""
        return self._gloo.cut_one()

    def _gone(self) -> GroupAborted:
        return GroupAborted(f"generation {self.generation} was aborted", self.generation)

    def _broken(self, problem: object) -> GroupError:
        return (
            self._gone() if self._aborted else GroupBroken(f"generation {self.generation}: {problem}", self.generation)
        )

    @property
    def aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        """Returns at once, and so does whoever waits in the group; the device comes free some 50 ms later."""
        with self._lock:
            first, self._aborted = not self._aborted, True
        self._gloo.abort()
        if first:
            threading.Thread(target=self._end, name=f"craft-abort-{self.generation}", daemon=True).start()

    def _end(self) -> None:
        """Abort what is under way on the device. If even that hangs, this process is of no use any more."""
        end = threading.Timer(_ABORT_LIMIT_S, _give_up, args=(self.generation,))
        end.daemon = True
        end.start()
        try:
            self._communicator.abort()
        except NcclError as error:
            logger.warning("generation %d: %s", self.generation, error)
        end.cancel()

    def close(self) -> None:
        self.abort()


def _give_up(generation: int) -> None:
    logger.critical(
        "the abort of generation %d has not returned for %.0f s: the device does not answer, and this worker ends",
        generation, _ABORT_LIMIT_S,
    )  # fmt: skip
    os._exit(EXIT_NOT_FREED)
