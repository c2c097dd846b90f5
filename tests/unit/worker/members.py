"""Members of a generation as threads of one process, between real Gloo connections: for what needs no faults."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from craft.groups.gloo import GlooGroup
from craft.groups.rendezvous import RendezvousStore
from craft.protocol.errors import CraftError
from craft.protocol.membership import Generation, Member

T = TypeVar("T")

LIMIT_S = 90.0
KEY = bytes(range(32))
_meetings = itertools.count()


@functools.cache
def _store() -> RendezvousStore:
    """One for all tests of a process: it lives as long as that, and its thread, too."""
    return RendezvousStore("127.0.0.1", KEY)


class _Member(threading.Thread, Generic[T]):
    def __init__(
        self, generation: Generation, rank: int, act: Callable[[GlooGroup], T], met: threading.Barrier
    ) -> None:
        super().__init__(daemon=True)
        self._generation = generation
        self._rank = rank
        self._act = act
        self._met = met
        self.group: GlooGroup | None = None
        self.result: T | CraftError | None = None

    def run(self) -> None:
        try:
            self.group = GlooGroup(self._generation, self._rank, "127.0.0.1", KEY, LIMIT_S, directly=True)
            # One that leaves the group at once would break what another one still opens.
            self._met.wait(LIMIT_S)
            self.result = self._act(self.group)
        except CraftError as error:
            self.result = error


def together(size: int, act: Callable[[GlooGroup], T]) -> list[T | CraftError | None]:
    """Let ``size`` members meet and each call ``act``; returns what each got, or the error of ours that it raised."""
    members = tuple(Member(worker_id=f"w{rank}", store_port=_store().port) for rank in range(size))
    generation = Generation(number=1, nonce=f"test{next(_meetings)}", members=members)
    met = threading.Barrier(size)
    threads = [_Member(generation, rank, act, met) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a member is still blocked"
    # Not before all are done: who leaves early breaks what the others have not finished.
    for thread in threads:
        if thread.group is not None:
            thread.group.close()
    return [thread.result for thread in threads]
