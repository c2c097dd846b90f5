"""One call of ``job.steps``: everything that the loop needs, put together, and what happens around each step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from craft.protocol.errors import BitsDiffer, ConfigError, GroupError
from craft.protocol.events import Event, GenerationEntered, StateDiverged, StepRetried, StopRequested, WorkerLost
from craft.protocol.membership import DROPPED, Settlement
from craft.settings.worker import WorkerSettings
from craft.snapshots.state import Leaf, RotatingDigest, Stateful, digest, module_leaves, registered_leaves
from craft.worker.buffers import Buffers
from craft.worker.channel import Channel
from craft.worker.chronicle import Chronicle
from craft.worker.commit import Commitments
from craft.worker.data import Source
from craft.worker.exchange import Attempt, ExchangeThread
from craft.worker.flight import Flight
from craft.worker.gather import gather
from craft.worker.gradients import Gradients
from craft.worker.layout import Layout
from craft.worker.meeting import Meeting
from craft.worker.points import reach
from craft.worker.start import Conditions, check_conditions, make_equal

if TYPE_CHECKING:
    from craft.worker.steps import Step

logger = logging.getLogger(__name__)

_SMOOTHING = 0.1


class Training:
    """Owned by the main thread."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        meeting: Meeting,
        channel: Channel | None,
        commitments: Commitments,
        modules: Mapping[str, torch.nn.Module],
        registered: Mapping[str, Stateful],
        source: Source,
        seed: int,
        total_steps: int | None,
        conditions: Conditions,
        emit: Callable[[Event], None],
    ) -> None:
        self.settings = settings
        self.commitments = commitments
        self.source = source
        self.seed = seed
        self.total_steps = total_steps
        self.current: Step | None = None
        self.stop_reason: str | None = None
        self._meeting = meeting
        self._channel = channel
        self._modules = modules
        self._registered = registered
        self._conditions = conditions
        self._emit = emit
        self._params = _parameters(modules)
        self._buffers = Buffers(list(modules.values()))
        self._exchange = ExchangeThread(self._exchange_broke)
        self._digest = RotatingDigest(settings.digest_bytes)
        self._chronicle = Chronicle(settings.run_dir, settings.worker_id)
        self._expected: tuple[int, tuple[int, ...]] | None = None
        self._ended = False
        self._last_commit = 0.0
        self._step_s = 0.0
        self.flight = self._new_flight()
        self.flight.probe_wanted = settings.check_bits

    def _new_flight(self) -> Flight:
        layout = Layout(self._params, int(self.settings.bucket_mb * (1 << 20)))
        return Flight(
            self.commitments,
            self._exchange,
            Gradients(layout),
            self._buffers,
            self._digest,
            self.leaves,
            self.source.size_of,
            self._settled,
            self._exchange_broke,
        )

    def leaves(self) -> list[Leaf]:
        """The whole training state."""
        return [*module_leaves(self._modules), *registered_leaves(self._registered)]

    def start(self) -> None:
        """Meet the others, and make sure that all begin from the same state under the same conditions."""
        settlement = self.commitments.regroup(self.source.size_of)
        # A loss meanwhile leads to another round, unless somebody has come through: then all have, and may be on their way.
        while not self.commitments.started:
            try:
                self._compare()
                self.commitments.started = True
            except GroupError as error:
                self._meeting.broke(self.commitments.ledger.generation, error)
                self.commitments.await_move()
                settlement = self.commitments.regroup(self.source.size_of)
        reach("started", self.commitments.step)
        self._report(total_steps=self.total_steps)
        self._settled(settlement)
        self._last_commit = time.time()

    def _compare(self) -> None:
        group, members = self.commitments.group, self.commitments.ledger.members
        check_conditions(group, members, self._conditions)
        unequal = make_equal(group, members, self.leaves())
        if unequal is not None:
            logger.warning(
                "workers %s began with other parameters than %s (first: %s): all now have those of %s",
                ", ".join(unequal.worker_ids), unequal.source, unequal.first, unequal.source,
            )  # fmt: skip
            self._report(unequal=unequal)

    def wants_more(self) -> bool:
        if self._ended:
            return False
        self._meeting.step = self.commitments.step
        return self.total_steps is None or self.commitments.step < self.total_steps

    def begin(self) -> None:
        """The inner loop of a step begins."""
        if not self.flight.gradients.layout.fits():
            # Code between the steps froze or unfroze parameters, and does so on every worker.
            self.flight.gradients.detach()
            probe_wanted, self.flight = self.flight.probe_wanted, self._new_flight()
            self.flight.probe_wanted = probe_wanted
        self.flight.begin()

    def next_microbatch(self) -> int | None:
        """What the inner loop computes next; the data source is told what to expect."""
        self.flight.stop_reason = self.stop_reason or self._meeting.winding_down
        try:
            microbatch = self.flight.next_microbatch()
        except BitsDiffer as error:
            self._diverged(error)
            raise
        ledger = self.commitments.ledger
        if microbatch is not None and self._expected != (self.commitments.step, ledger.owners):
            self._expected = (self.commitments.step, ledger.owners)
            self.source.expect(self.commitments.step, ledger.share)
        return microbatch

    def committed(self, number: int) -> dict[str, float]:
        """A step was committed: write it down and report it. Returns its metrics."""
        flight, ledger = self.flight, self.commitments.ledger
        combined = flight.combined
        assert combined is not None and combined.step == number
        if combined.empty:
            raise ConfigError("the stream ended before it gave any data: there is nothing to train on")
        metrics = dict(combined.metrics)
        self._chronicle.committed(
            step=number,
            branch=ledger.branch,
            generation=ledger.generation,
            members=ledger.members,
            worker_id=ledger.worker_id,
            plan=flight.plan,
            metrics=metrics,
        )
        flight.probe_wanted = False
        self._ended = combined.ended or combined.stop is not None
        if combined.stop is not None:
            self._emit(StopRequested(reason=combined.stop))
        now = time.time()
        elapsed, self._last_commit = now - self._last_commit, now
        self._step_s = elapsed if not self._step_s else self._step_s + _SMOOTHING * (elapsed - self._step_s)
        self._report(urgent=False, step=number + 1, metrics=metrics, step_s=self._step_s)
        return metrics

    def end(self) -> None:
        """Every step is committed here; leave only when it is everywhere, as far as the others are still there."""
        while True:
            try:
                # Once this returns, everybody has come here: nobody needs anything from this worker any more.
                gather(self.commitments.group, b"")
                break
            except GroupError as error:
                self._meeting.broke(self.commitments.ledger.generation, error)
                self.commitments.await_move()
                self._settled(self.commitments.regroup(self.source.size_of))
        self._chronicle.complete()
        self._report(complete=True, step=self.commitments.step, digest=digest(self.leaves()))

    def close(self) -> None:
        self.flight.gradients.detach()
        self._meeting.close()
        self._exchange.stop()
        self.source.close()

    def _settled(self, settlement: Settlement) -> None:
        """A new generation is settled: tell the lighthouse, and the script if it wants to know."""
        ledger, generation = self.commitments.ledger, self.commitments.ledger.generation
        # Whether it was in a step or still before its first one: from here on all look at the same slices.
        self._digest.restart(settlement.level + 1)
        dropped = tuple(index for index, owner in enumerate(settlement.owners) if owner == DROPPED)
        changes: dict[str, Any] = {"generation": generation, "broken": None}
        if settlement.given or dropped:
            retried = StepRetried(generation=generation, step=settlement.level, given=settlement.given, dropped=dropped)
            changes["retried"] = retried
            self._emit(retried)
        self._report(**changes)
        for worker_id in self.commitments.lost:
            self._emit(WorkerLost(worker_id=worker_id, reason=f"not in generation {generation}", source="peers"))
        self._emit(GenerationEntered(worker_id=ledger.worker_id, generation=generation))

    def _exchange_broke(self, attempt: Attempt) -> None:
        """Say at once that the group broke; also on the exchange thread, since the main thread may compute for long."""
        if attempt.group is not None and attempt.error is not None:
            self._meeting.broke(attempt.group.generation, attempt.error)

    def _diverged(self, error: BitsDiffer) -> None:
        members = self.commitments.ledger.members
        self._report(diverged=StateDiverged(step=self.commitments.step, detail=str(error), worker_ids=members))

    def _report(self, *, urgent: bool = True, **changes: Any) -> None:
        if self._channel is not None:
            self._channel.report(urgent=urgent, **changes)


def _parameters(modules: Mapping[str, torch.nn.Module]) -> list[torch.nn.Parameter]:
    """All parameters, shared ones once, in the order of the modules."""
    found: dict[int, torch.nn.Parameter] = {}
    for module in modules.values():
        for param in module.parameters():
            found.setdefault(id(param), param)
    return list(found.values())
