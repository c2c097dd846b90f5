"""``Attend``: a worker of ``craft run`` whose loop ``inprocess.Wrapper`` restarts, as a plug-in for ``rank_assignment``.

The wrapper calls it before every iteration, with its store and the ranks. When CRAFT decides that a worker is lost, or that
all are to abort, it interrupts the iteration at once, on every rank.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable

from nvidia_resiliency_ext.inprocess.health_check import HealthCheck
from nvidia_resiliency_ext.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx

from craft.adapters.nvrx.plugins import TellHealth
from craft.adapters.nvrx.ranks import Ranks
from craft.settings.worker import WorkerSettings
from craft.worker.entry.join import attend
from craft.worker.external.external_worker import Guest
from craft.worker.external.generation_follower import Change

logger = logging.getLogger(__name__)

_NAME = "nvrx"


class Attend(RankAssignment):
    """Make one before the wrapper is called: it gives the rank. Name it first in ``Compose``, which calls it last."""

    def __init__(self) -> None:
        if WorkerSettings.from_environment().late:
            logger.warning(
                "the wrapper admits no late workers: this worker ends (craft run --max-restarts 0 starts none)"
            )
            sys.exit(0)
        # Guards the next two: CRAFT's thread and the wrapper's use them.
        self._change = threading.Lock()
        self._ranks: Ranks | None = None
        self._lost: set[str] = set()
        """Lost workers reported to an iteration; the next one may not know them if that was between the two."""
        self._checks = 0
        """Passed health checks of this iteration: the wrapper makes one before the function and one after a fault."""
        self._guest: Guest = attend(self._changed, meets=True)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        # Before the first iteration it is the store itself, then that of the previous iteration.
        again = hasattr(ctx.store, "base_store")
        ranks = Ranks(ctx.store, ctx.state, ctx.state.iteration + 1 if again else 0)
        self._begins()
        if again:
            place = f"rank {ctx.state.rank} of {ctx.state.world_size}"
            self.tell("restarted", f"iteration {ranks.iteration} begins as {place}", value=ranks.iteration)
        else:
            ranks.announce(self._guest.worker_id)
        with self._change:
            self._ranks = ranks
            lost, self._lost = self._lost, set()
        if lost:
            # Not here: all ranks announce themselves after this.
            threading.Thread(target=_tell, args=(ranks, lost), name="craft-lost", daemon=True).start()
        return ctx

    def _changed(self, change: Change) -> None:
        with self._change:
            self._lost |= set(change.lost)
            ranks = self._ranks
        if ranks is not None and change.lost:
            ranks.lose(change.lost)
        elif ranks is not None:
            ranks.interrupt(str(change.generation))

    def step(self, committed: int, /, **metrics: float) -> None:
        """Report the number of completed steps, by which CRAFT sees progress. It may drop after a restart."""
        self._guest.step(committed, **metrics)

    @property
    def guest(self) -> Guest:
        """The connection of this worker to CRAFT."""
        return self._guest

    def health(self, check: HealthCheck) -> TellHealth:
        """Return the same check, which also reports its findings as events."""
        return TellHealth(check, self.tell, self._passed)

    def _passed(self) -> None:
        self._checks += 1
        if self._checks == 2:
            # It waits for all to leave the iteration: those still in it delay this one.
            self._guest.exchange_began()

    def _begins(self) -> None:
        if self._checks >= 2:
            self._guest.exchange_ended()
        self._checks = 0

    def tell(self, what: str, detail: str, value: float | None = None) -> None:
        self._guest.tell(_NAME, what, value, detail)


def _tell(ranks: Ranks, lost: Iterable[str]) -> None:
    try:
        ranks.lose(lost)
    except Exception as error:  # noqa: BLE001  (the edge of a thread: NVRx finds out by itself, some time later)
        logger.warning("cannot tell iteration %s who is lost: %s", ranks.iteration, error)
