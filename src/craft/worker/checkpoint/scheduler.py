"""Decide when to take checkpoints, and take this worker's share.

Input: what the script, the settings and the lighthouse want, once all workers agree on it by the control word. Output: a snapshot
at a step boundary, which ``CheckpointWriter`` makes durable on a separate thread. Owned by the main thread.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from time import monotonic

from craft.decide.step.interval import Every, choose
from craft.decide.techniques.technique import Hooks, Moment
from craft.protocol.events import AnyNote, CheckpointAbandoned, CheckpointSkipped, CheckpointWritten, IntervalChosen
from craft.protocol.membership import Generation
from craft.snapshots.checkpoint.writer import CheckpointWriter
from craft.snapshots.state.serialized import State
from craft.telemetry.fault_points import reach
from craft.worker.checkpoint.due import DueCheckpoint, covers_positions, share_in
from craft.worker.membership.client import MembershipClient
from craft.worker.reduce.word_parts import CheckpointPart
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.reporter import Reporter, paused
from craft.worker.state.checkpoint_target import CheckpointTarget

logger = logging.getLogger(__name__)

_FIRST_S = 10.0
"""With ``auto``, the first checkpoint comes after this time: it shows what one costs."""
_CHANGED = 1.25
"""A choice that differs by less is not reported."""
_SETTLED = 3
"""When no share has been in writing for this many steps, a checkpoint not known to be complete never will be."""
_END_LIMIT_S = 600.0
"""How long a worker that has finished waits for its share to be written."""


class CheckpointScheduler(Hooks):
    """One worker's part in the job's checkpoints: the hooks of ``checkpoints``, and fields of the control word."""

    def __init__(
        self,
        target: CheckpointTarget,
        worker_id: str,
        membership: MembershipClient,
        reporter: Reporter,
        activity: ActivityPage,
        state: Callable[[], State],
        ends_epoch: Callable[[int], int | None],
    ) -> None:
        """``ends_epoch(step)``: the pass over the data that ends with ``step``, if one does."""
        self._ends_epoch = ends_epoch
        self._every = target.every
        self._worker_id = worker_id
        self._membership = membership
        self._reporter = reporter
        self._activity = activity
        self._state = state
        self._news: queue.SimpleQueue[AnyNote] = queue.SimpleQueue()
        """Events of the writing thread, for the script."""
        self._writer = CheckpointWriter(target.tiers, worker_id, target.keep, self._told)
        self._due: list[DueCheckpoint] = []
        self._open: DueCheckpoint | None = None
        """Taken, and not known to be complete."""
        self._idle = 0
        """Number of steps for which no worker has been writing a share of it."""
        self._tiers = target.tiers
        self._again: str | None = None
        """Tag of a checkpoint to take as soon as possible, because another one failed."""
        self._members: tuple[str, ...] = ()
        """Members of the generation that this worker acts under."""
        self._answered = membership.wishes[-1].number if membership.wishes else 0
        """The newest answered wish, as all before it were. The others answer wishes older than this worker."""
        self.saved = (0, 0)
        """(branch, committed steps) of the newest checkpoint known to be complete."""
        self._heard = (0, 0)
        """The newest that all workers know."""
        self._leaves = False
        self._began = self._last = monotonic()
        self._clock = _Clock()
        self._stall_s = 0.0
        """How long the last one delayed the main thread."""
        self._interval_s = _FIRST_S
        self._failures = 0
        reporter.report(urgent=False, checkpoints=True)

    def _told(self, event: AnyNote) -> None:
        """Forward an event, on the writing thread."""
        self._reporter.note(event)
        self._news.put(event)

    # Fields of a step's control word.

    def word_part(self, step: int, leads: bool) -> CheckpointPart:
        """Return this worker's part of the word of ``step``; the leader looks at the clock for all."""
        wish = next((each for each in self._membership.wishes if each.number > self._answered), None)
        return CheckpointPart(
            save=(wish.tag or "") if wish is not None else self._wanted(step, leads),
            wish=wish.number if wish is not None else 0,
            busy=self._writer.busy,
            saved=self.saved,
            leave=self._membership.preempting is not None,
        )

    def _wanted(self, step: int, leads: bool) -> str | None:
        if self._again is not None:
            return self._again
        if self._every.steps is not None:
            return "" if (step + 1) % self._every.steps == 0 else None
        if self._every.epochs is not None:
            epoch = self._ends_epoch(step)
            return "" if epoch is not None and (epoch + 1) % self._every.epochs == 0 else None
        interval_s = self._every.seconds or self._interval_s
        return "" if leads and monotonic() - self._last >= interval_s else None

    def after_commit(self, moment: Moment) -> None:
        """Schedule a checkpoint that the control word agreed on; members that reported able in it write shares."""
        combined, under = moment.word, moment.under
        assert combined is not None and under is not None
        self._members = moment.members
        self._hear()
        self._clock.committed(self._writer.busy)
        leads = under.worker_ids[0] == self._worker_id
        if combined.saved > self._heard:
            self._heard = self.saved = max(self.saved, combined.saved)
            self._choose(leads)
        if self._open is not None and self.saved >= (self._open.branch, self._open.step):
            self._open = None
        self._give_up_if_apart(combined.busy, leads)
        self._leaves = combined.leave
        if combined.save is None and not combined.leave:
            return
        step = combined.step + 1
        if combined.busy and combined.wish and not combined.leave:
            # It is not skipped: all workers repeat it until it can be taken.
            return
        # An epoch ends once: there, wait for the previous checkpoint.
        if combined.busy and not combined.leave and self._every.epochs is None:
            self._last = monotonic()
            if leads:
                reason = "the one before it is still being written"
                self._reporter.note(CheckpointSkipped(step=step, reason=reason))
            return
        self._answered = max(self._answered, combined.wish)
        members = tuple(under.worker_ids[rank] for rank in combined.able)
        if self._worker_id in members:
            self._due.append(DueCheckpoint(step, moment.branch, combined.save or None, under, members, agreed=True))

    def ask(self, tag: str | None, step: int, branch: int, under: Generation, members: tuple[str, ...]) -> None:
        """Schedule a checkpoint that the script of every worker in ``members`` asks for now."""
        self._due.append(DueCheckpoint(step, branch, tag, under, members))

    # At a step boundary.

    def at_boundary(self) -> bool:
        """Copy this worker's share of the last commit's state if a checkpoint is due; return whether one was.

        Raises Left if all leave.
        """
        dues, self._due = self._due, []
        for due in dues:
            self._take(due)
        if self._leaves:
            self._wait("a checkpoint before the job makes room", self._time_left())
            if not dues or self._is_whole(dues[-1]):
                self._membership.leave()
        return bool(dues)

    def _is_whole(self, due: DueCheckpoint) -> bool:
        """Wait for the others' shares; return False if one is lost: the remaining workers take another checkpoint."""
        last = self._writer.last
        if last is not None and not last.written:
            # This share was given up, or no time is left: there is nothing to wait for.
            return True
        with paused(self._activity, self._reporter, "the others' shares of the last checkpoint"):
            return self._membership.wait_saved((due.branch, due.step), due.generation.number, self._time_left())

    def _take(self, due: DueCheckpoint) -> None:
        if not covers_positions(due.generation, due.members):
            if due.members[0] == self._worker_id:
                reason = "at some position of the replicas no worker has the whole state now"
                self._reporter.note(CheckpointSkipped(step=due.step, reason=reason))
            return
        if self._writer.busy:
            # Only a requested checkpoint gets here: it is not skipped.
            with paused(self._activity, self._reporter, "the checkpoint before this one"):
                self._writer.wait_free(self._time_left())
        if due.agreed and self._again in ("", due.tag or ""):
            self._again = None
        place = due.share_of(self._worker_id)
        began = time.perf_counter()
        self._writer.take(self._state(), place)
        self._stall_s = time.perf_counter() - began
        logger.info("copies its share of checkpoint %s; that held the step up for %.3f s", due.name, self._stall_s)
        self._open, self._idle, self._last = due, 0, monotonic()
        reach("saved", due.step)
        # A worker may have been lost since the agreement.
        self._give_up_if_lost()

    def _time_left(self) -> float:
        preempting = self._membership.preempting
        if preempting is None or preempting.deadline is None:
            return _END_LIMIT_S
        return max(0.0, preempting.deadline - time.time())

    def _wait(self, why: str, limit_s: float) -> None:
        with paused(self._activity, self._reporter, why):
            self._writer.wait(limit_s)

    def prepare(self, under: Generation, members: Sequence[str]) -> bool:
        """Prepare memory for this worker's share: its first touch would cost a step more than the copy does.

        Returns False while the previous checkpoint is still being written.
        """
        if self._writer.busy:
            return False
        if self._worker_id in members:
            self._writer.prepare(self._state().header, *share_in(self._worker_id, under, members))
        return True

    def generation_change(self, moment: Moment) -> None:
        """Retake a checkpoint if a member was lost before it was complete."""
        self._members = moment.members
        self._failures += bool(moment.lost)
        self._give_up_if_lost()

    def _give_up_if_lost(self) -> None:
        due = self._open
        if due is None or all(worker_id in self._members for worker_id in due.members):
            return
        self._open, self._again = None, due.tag or ""
        if self._members[0] == self._worker_id:
            gone = ", ".join(worker_id for worker_id in due.members if worker_id not in self._members)
            reason = f"{gone} was lost before it was known to be complete: another one is taken"
            self._reporter.note(CheckpointAbandoned(name=due.name, step=due.step, reason=reason))

    def _give_up_if_apart(self, busy: bool, leads: bool) -> None:
        """Give up a checkpoint that all wrote and none listed: the shares are in several places.

        With a local tier this shows nothing, because shares are copied on later.
        """
        self._idle = 0 if busy or self._tiers.local is not None else self._idle + 1
        if self._open is None or self._idle < _SETTLED:
            return
        due, self._open = self._open, None
        last = self._writer.last
        # Why this worker's share was given up is reported already.
        if leads and (last is None or last.written):
            reason = f"all shares are written or given up, and {self._tiers.url} does not have them all: do all hosts see it?"
            self._reporter.note(CheckpointAbandoned(name=due.name, step=due.step, reason=reason))

    def went_back(self, branch: int, step: int) -> None:
        """Continue from the checkpoint of ``step``, in ``branch``."""
        self.saved = self._heard = (branch, step)
        self._due, self._open, self._again = [], None, None

    def at_end(self, step: int, branch: int, generation: Generation, members: tuple[str, ...]) -> None:
        """Take a last checkpoint unless this state has one; return when this share is written."""
        if self.saved != (branch, step) and (self._open is None or self._open.step != step):
            self._take(DueCheckpoint(step, branch, None, generation, members))
        self.finish()

    def finish(self) -> None:
        """Wait until the copied shares are written."""
        self._wait("the last checkpoint", self._time_left())
        self._hear()

    def close(self) -> None:
        self._writer.close()

    # Cost.

    def _hear(self) -> None:
        """Pass the writing thread's events to the script."""
        while not self._news.empty():
            event = self._news.get()
            if isinstance(event, CheckpointWritten):
                self.saved = max(self.saved, (event.branch, event.step))
            self._reporter.emit(event)

    def _choose(self, leads: bool) -> None:
        """Choose the interval after a complete checkpoint, on every worker, since any may become the leader."""
        if self._every != Every():
            return
        cost_s = self._stall_s + self._clock.slowed_s
        choice = choose(cost_s, self._writer.write_s, monotonic() - self._began, self._failures)
        changed = max(choice.interval_s, self._interval_s) / min(choice.interval_s, self._interval_s)
        self._interval_s = choice.interval_s
        if leads and changed >= _CHANGED:
            interval_s, cost_s = round(choice.interval_s, 3), round(cost_s, 6)
            self._reporter.note(IntervalChosen(interval_s=interval_s, reason=choice.reason, cost_s=cost_s))


class _Clock:
    """Measures how much steps slow down while a checkpoint is written."""

    _SMOOTHING = 0.1

    def __init__(self) -> None:
        self.slowed_s = 0.0
        """Total for the last checkpoint."""
        self._usual_s = 0.0
        self._last = 0.0
        self._was_busy = False

    def committed(self, busy: bool) -> None:
        now = monotonic()
        elapsed, self._last = now - self._last, now
        if busy and not self._was_busy:
            self.slowed_s = 0.0
        if busy or self._was_busy:
            self.slowed_s += max(0.0, elapsed - self._usual_s) if self._usual_s else 0.0
        elif elapsed < now:
            self._usual_s += (elapsed - self._usual_s) * (self._SMOOTHING if self._usual_s else 1.0)
        self._was_busy = busy
