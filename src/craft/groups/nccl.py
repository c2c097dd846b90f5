"""The NCCL group: device tensors go through NCCL, everything else (words, acknowledgements, claims) through Gloo.

Gloo's connections also reveal a peer's death, which NCCL does not. NCCL runs on the group's stream, and no other stream waits
for it: the main thread polls the device for the end of an exchange and can stop polling. An exchange that hangs blocks only
that stream, until the abort ends it.
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
from craft.groups.group import EXIT_NOT_FREED, Pending, Transfers
from craft.groups.nccl_calls import Communicator, NcclError
from craft.protocol.errors import GroupAborted, GroupBroken, GroupError

logger = logging.getLogger(__name__)

_LOOK_S = 20e-6
"""Pause between polls of the device; the kernel stretches it to some 70 microseconds."""
_LOOK_FOR_ERRORS_S = 0.1
_ABORT_LIMIT_S = 10.0
"""An abort that takes longer never returns: the device does not answer, and this process cannot change that."""


class NcclGroup:
    """One generation's connections between devices."""

    def __init__(self, gloo: GlooGroup, device: torch.device, identity: bytes) -> None:
        """Connect the devices of the members of ``gloo``, which all have the same ``identity`` from one of them.

        Blocks until all arrive, for ever if one dies meanwhile: call it on a thread that can be abandoned. Raises GroupError.
        """
        self.generation = gloo.generation
        self.rank = gloo.rank
        self.size = gloo.size
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._gloo = gloo
        # Guards the flag: any thread may call abort().
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
        """Make NCCL connect all ranks now: it connects two ranks on first use, which would be in the middle of a step."""
        with torch.cuda.stream(self.stream):
            signals = torch.zeros(self.size, 16, dtype=torch.uint8, device=self.device)
            others = [rank for rank in range(self.size) if rank != self.rank]
            self.swap([(signals[self.rank], rank) for rank in others], [(signals[rank], rank) for rank in others])
        self.wait_device(self.mark())

    # Between devices.

    def swap(self, sends: Transfers, receives: Transfers) -> None:
        """Enqueue sends and receives on the group's stream; each pair of ranks must list them in the same order."""
        if self._aborted:
            raise self._gone()
        try:
            self._communicator.swap(sends, receives, self.stream)
        except NcclError as error:
            raise self._broken(error) from error

    def mark(self) -> torch.cuda.Event:
        """Return an event behind everything enqueued on the group's stream so far."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait_device(self, mark: torch.cuda.Event) -> None:
        """Block until the stream reaches ``mark``; raise GroupError if it never will, or reaches it through an abort.

        An abort lets the stream continue past half-received data, so that the flag is checked again at the end.
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
        """Unblock every waiter and return at once; the device comes free some 50 ms later."""
        with self._lock:
            first, self._aborted = not self._aborted, True
        self._gloo.abort()
        if first:
            threading.Thread(target=self._end, name=f"craft-abort-{self.generation}", daemon=True).start()

    def _end(self) -> None:
        """Abort the work on the device; exit the process if even that hangs."""
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
        "abort of generation %d still blocked after %.0f s: the device does not answer; exiting %d for replacement",
        generation, _ABORT_LIMIT_S, EXIT_NOT_FREED,
    )  # fmt: skip
    os._exit(EXIT_NOT_FREED)
