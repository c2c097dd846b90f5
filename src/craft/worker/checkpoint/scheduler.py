"""When checkpoints are taken, and the taking of this worker's share.

Enters: what the script, the settings and the lighthouse want, as far as the control word makes all workers agree on it.
Leaves: a snapshot at a step boundary, which ``snapshots.writer`` makes durable on a thread of its own. Owned by the main thread.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from craft.decide.step.interval import Every, choose
from craft.decide.techniques.technique import Hooks, Moment
from craft.protocol.events import (
    AnyNote,
    CheckpointAbandoned,
    CheckpointSkipped,
    CheckpointWritten,
    IntervalChosen,
)
from craft.protocol.membership import Generation
from craft.snapshots.checkpoint.writer import CheckpointShare, CheckpointWriter
from craft.snapshots.state.serialized import State
from craft.snapshots.store.manifest import name_of
from craft.telemetry.fault_points import reach
from craft.worker.membership.client import MembershipClient
from craft.worker.reduce.word_parts import CheckpointPart
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.reporter import Reporter, paused
from craft.worker.state.checkpoint_target import CheckpointTarget

logger = logging.getLogger(__name__)

_FIRST_S = 10.0
"""With ``auto``, the first one comes after so long: it shows what one costs."""
_CHANGED = 1.25
"""A choice that differs by less is not worth telling."""
_SETTLED = 3
"""When everybody's share has been written for so many steps, one that is not known to be complete will never be."""
_END_LIMIT_S = 600.0
"""How long a worker that is done waits for its share to be written."""


class DueCheckpoint(NamedTuple):
    """A checkpoint that all have agreed to take at the next step boundary."""

    step: int
    """Committed steps that will be in it."""
    branch: int
    tag: str | None
    generation: Generation
    """In which they agreed; who of it is there then takes part."""
    members: tuple[str, ...]
    """Who writes a share, in the order of shares."""
    agreed: bool = False
    """By the word of a step, and not by a call of the script."""

    @property
    def name(self) -> str:
        # Several with different tags may be taken at one place.
        tag = hashlib.blake2b(self.tag.encode(), digest_size=4).hexdigest() if self.tag is not None else "0"
        return name_of(self.branch, self.step, f"{self.generation.number}_{self.generation.nonce}_{tag}")


class CheckpointScheduler(Hooks):
    """One job's checkpoints, as one worker sees them: the hooks of the technique ``checkpoints``, with a part in the word."""

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
        """What the writing thread has to tell the script."""
        self._writer = CheckpointWriter(target.tiers, worker_id, target.keep, self._told)
        self._due: list[DueCheckpoint] = []
        self._open: DueCheckpoint | None = None
        """Taken, and not known to be complete."""
        self._idle = 0
        """For how many steps nobody has been writing a share of it."""
        self._tiers = target.tiers
        self._again: str | None = None
        """One with this tag is to be taken as soon as possible, because another one came to nothing."""
        self._members: tuple[str, ...] = ()
        """Of the generation that this worker acts under."""
        self._answered = membership.wishes[-1].number if membership.wishes else 0
        """The newest wish that was answered, as all before it were. What is older than this worker is the others' to say."""
        self.saved = (0, 0)
        """(branch, committed steps) of the newest checkpoint that is known to be complete."""
        self._heard = (0, 0)
        """The newest of which everybody knows."""
        self._leaves = False
        self._began = self._last = time.monotonic()
        self._clock = _Clock()
        self._stall_s = 0.0
        """How long the last one held the main thread up."""
        self._interval_s = _FIRST_S
        self._failures = 0
        reporter.report(urgent=False, checkpoints=True)

    def _told(self, event: AnyNote) -> None:
        """On the writing thread."""
        self._reporter.note(event)
        self._news.put(event)

    # What the word of a step says.

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
        return "" if leads and time.monotonic() - self._last >= interval_s else None

    def after_commit(self, moment: Moment) -> None:
        """Whoever said in the word that it can compute has its share of what is taken; who catches up did not."""
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
            # It is not skipped: everybody says it again, until it can be taken.
            return
        # The end of an epoch comes once: there the one before it is waited for.
        if combined.busy and not combined.leave and self._every.epochs is None:
            self._last = time.monotonic()
            if leads:
                reason = "the one before it is still being written"
                self._reporter.note(CheckpointSkipped(step=step, reason=reason))
            return
        self._answered = max(self._answered, combined.wish)
        members = tuple(under.worker_ids[rank] for rank in combined.able)
        if self._worker_id in members:
            self._due.append(DueCheckpoint(step, moment.branch, combined.save or None, under, members, agreed=True))

    def ask(self, tag: str | None, step: int, branch: int, under: Generation, members: tuple[str, ...]) -> None:
        """The script of every worker in ``members`` asks for one, now."""
        self._due.append(DueCheckpoint(step, branch, tag, under, members))

    # At a step boundary.

    def at_boundary(self) -> bool:
        """The state is that of the last commit: copy this worker's share if one is due; whether one was.

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
        """Wait for the others' shares; False if one of them is lost: those who are left take another checkpoint."""
        last = self._writer.last
        if last is not None and not last.written:
            # This share was given up, or there is no time left: there is nothing to wait for.
            return True
        with paused(self._activity, self._reporter, "the others' shares of the last checkpoint"):
            return self._membership.wait_saved((due.branch, due.step), due.generation.number, self._time_left())

    def _take(self, due: DueCheckpoint) -> None:
        if self._writer.busy:
            # Only one that somebody asked for comes here: it is not skipped.
            with paused(self._activity, self._reporter, "the checkpoint before this one"):
                self._writer.wait_free(self._time_left())
        if due.agreed and self._again in ("", due.tag or ""):
            self._again = None
        place = CheckpointShare(
            name=due.name,
            branch=due.branch,
            step=due.step,
            generation=due.generation.number,
            tag=due.tag,
            part=due.members.index(self._worker_id),
            of=len(due.members),
        )
        began = time.perf_counter()
        self._writer.take(self._state(), place)
        self._stall_s = time.perf_counter() - began
        logger.info("copies its share of checkpoint %s; that held the step up for %.3f s", due.name, self._stall_s)
        self._open, self._idle, self._last = due, 0, time.monotonic()
        reach("saved", due.step)
        # Somebody may have been lost since it was agreed upon.
        self._give_up_if_lost()

    def _time_left(self) -> float:
        preempting = self._membership.preempting
        if preempting is None or preempting.deadline is None:
            return _END_LIMIT_S
        return max(0.0, preempting.deadline - time.time())

    def _wait(self, why: str, limit_s: float) -> None:
        with paused(self._activity, self._reporter, why):
            self._writer.wait(limit_s)

    def prepare(self, members: Sequence[str]) -> bool:
        """Make room for this worker's share: the first touch of memory would cost a step more than the copy does.

        False: not yet, the one before it is still being written.
        """
        if self._writer.busy:
            return False
        if self._worker_id in members:
            self._writer.prepare(self._state().header, members.index(self._worker_id), len(members))
        return True

    def generation_change(self, moment: Moment) -> None:
        """A checkpoint of which somebody's share is lost is taken anew."""
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
        """What everybody has written, and nobody has listed, is in several places; where it is copied on, that says nothing."""
        self._idle = 0 if busy or self._tiers.local is not None else self._idle + 1
        if self._open is None or self._idle < _SETTLED:
            return
        due, self._open = self._open, None
        last = self._writer.last
        # Why its own share was given up has been told.
        if leads and (last is None or last.written):
            reason = f"all shares are written or given up, and {self._tiers.url} does not have them all: do all hosts see it?"
            self._reporter.note(CheckpointAbandoned(name=due.name, step=due.step, reason=reason))

    def went_back(self, branch: int, step: int) -> None:
        """The state is that of the checkpoint of ``step``, from which ``branch`` goes on."""
        self.saved = self._heard = (branch, step)
        self._due, self._open, self._again = [], None, None

    def at_end(self, step: int, branch: int, generation: Generation, members: tuple[str, ...]) -> None:
        """Every step is committed: one more checkpoint, unless this state has one; returns when this share is written."""
        if self.saved != (branch, step) and (self._open is None or self._open.step != step):
            self._take(DueCheckpoint(step, branch, None, generation, members))
        self.finish()

    def finish(self) -> None:
        """Wait until what was taken is written."""
        self._wait("the last checkpoint", self._time_left())
        self._hear()

    def close(self) -> None:
        self._writer.close()

    # What it costs.

    def _hear(self) -> None:
        """Tell the script what the writing thread had to tell."""
        while not self._news.empty():
            event = self._news.get()
            if isinstance(event, CheckpointWritten):
                self.saved = max(self.saved, (event.branch, event.step))
            self._reporter.emit(event)

    def _choose(self, leads: bool) -> None:
        """One is complete: how often is worth it? Everybody works it out, since anybody may come to lead."""
        if self._every != Every():
            return
        cost_s = self._stall_s + self._clock.slowed_s
        choice = choose(cost_s, self._writer.write_s, time.monotonic() - self._began, self._failures)
        changed = max(choice.interval_s, self._interval_s) / min(choice.interval_s, self._interval_s)
        self._interval_s = choice.interval_s
        if leads and changed >= _CHANGED:
            interval_s, cost_s = round(choice.interval_s, 3), round(cost_s, 6)
            self._reporter.note(IntervalChosen(interval_s=interval_s, reason=choice.reason, cost_s=cost_s))


class _Clock:
    """By how much the steps are slower while a checkpoint is written."""

    _SMOOTHING = 0.1

    def __init__(self) -> None:
        self.slowed_s = 0.0
        """All in all, by the last one."""
        self._usual_s = 0.0
        self._last = 0.0
        self._was_busy = False

    def committed(self, busy: bool) -> None:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        if busy and not self._was_busy:
            self.slowed_s = 0.0
        if busy or self._was_busy:
            self.slowed_s += max(0.0, elapsed - self._usual_s) if self._usual_s else 0.0
        elif elapsed < now:
            self._usual_s += (elapsed - self._usual_s) * (self._SMOOTHING if self._usual_s else 1.0)
        self._was_busy = busy
