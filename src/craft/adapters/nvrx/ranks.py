"""Write CRAFT's losses into NVRx's store: a worker that CRAFT declares lost is a terminated rank there, at once.

NVRx finds out by itself, too: after a second if the rank's monitor process survives, after its heartbeat limit if that died
with it, after the hard timeout if the rank hangs. This writes what its monitors would write then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import PrefixStore, StoreMixin

logger = logging.getLogger(__name__)

# Names for which torch has no types.
dist: Any = torch.distributed

_KEY = "craft_worker_{worker_id}"
_ASKED = "craft_interruption_{name}"
_LIMIT = timedelta(seconds=5)
_CONNECT_LIMIT = timedelta(seconds=60)
"""torch asks a name server for every peer before it connects: a silent one takes 5 s, or a multiple of that."""
_AT_ONCE = timedelta(0)


class _Client(dist.TCPStore, StoreMixin):
    """A separate connection: the wrapper's is busy for a second at a time, waiting for an interruption."""


class Ranks:
    """One iteration of the wrapper, with its ranks."""

    def __init__(self, store: Any, state: State, iteration: int) -> None:
        """``store``: the wrapper's, as ``rank_assignment`` gets it."""
        base = getattr(store, "base_store", store)
        if isinstance(base, dist.TCPStore):
            base = _Client(base.host, base.port, is_master=False, wait_for_workers=False, timeout=_CONNECT_LIMIT)
            base.set_timeout(_LIMIT)
        self._base = base
        self._store = PrefixStore(iteration, base)
        self._state = state
        self.iteration = iteration

    def announce(self, worker_id: str) -> None:
        """Announce the rank that this worker began with; once."""
        self._base.set(_KEY.format(worker_id=worker_id), str(self._state.initial_rank))

    def interrupt(self, name: str) -> None:
        """Make every rank abort and begin the next iteration. Several calls with the same name do it once."""
        if self._base.add(_ASKED.format(name=name), 1) == 1:
            # Without a record: no rank is to blame for it.
            self._store.record_interrupted()
            logger.info("iteration %s is interrupted: %s", self.iteration, name)

    def lose(self, lost: Iterable[str]) -> None:
        """Do the same without these workers. Every survivor says so, since it may be lost next; repeating does no harm."""
        initial = {int(self._base.get(_KEY.format(worker_id=worker_id))) for worker_id in lost}
        ranks = range(self._state.world_size)
        began = [int(each) for each in self._store.get_initial_ranks(ranks)]
        gone = [rank for rank in ranks if began[rank] in initial]
        if not gone:
            # An iteration without them has begun already.
            return
        self._store.record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED) for rank in gone])
        self._store.record_terminated_ranks(gone)
        # Mark them as arrived at every barrier.
        self._store.iteration_barrier(ranks=gone, rendezvous_count=self._state.world_size, timeout=_AT_ONCE)
        self._base.termination_barrier(
            ranks=[began[rank] for rank in gone],
            rendezvous_count=self._state.initial_world_size,
            timeout=_AT_ONCE,
        )
        logger.info("iteration %s is interrupted: ranks %s are terminated", self.iteration, gone)
