"""Follow generations for a guest: read directives, run its ``abort`` callbacks, and record what acts."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from craft.protocol.generation_log import Entered
from craft.protocol.membership import Generation
from craft.protocol.messages import Directive

logger = logging.getLogger(__name__)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A generation with a member less, or one that was made so that every member aborts."""

    generation: int
    members: tuple[str, ...]
    """In the order of their ranks."""
    lost: tuple[str, ...]
    """Members of the generation before that are not in this one: lost, or asked to leave; empty if an order made all
    members abort."""
    told: float
    """When this worker heard of it, in seconds since 1970."""
    agreed: bool = False
    """Whether the departure was announced before: nothing failed."""

    @property
    def reason(self) -> str:
        """For people: ``w1 is not in generation 3``."""
        if not self.lost:
            return f"every member aborts its collectives and continues in generation {self.generation}"
        verb = "is" if len(self.lost) == 1 else "are"
        return f"{', '.join(self.lost)} {verb} not in generation {self.generation}"


Abort = Callable[[Change], None]


class GenerationFollower:
    """The generations of one guest. Any thread may call it; ``direct`` is for the channel's thread."""

    def __init__(
        self, worker_id: str, report: Callable[[int], None], entered: Callable[[Entered], None], *, starts: bool
    ) -> None:
        """``report`` gets the number of each new generation, ``entered`` its record. ``starts``: start the abort thread."""
        self._worker_id = worker_id
        self._report = report
        self._record = entered
        # Guards everything below: the channel's thread and the script's threads use it.
        self._change = threading.Condition()
        self._current: Generation | None = None
        self._acting: Generation | None = None
        """The generation that steps are recorded under: the one before until its collectives are aborted."""
        self._announced = 0
        """The upcoming generation before which a member is to leave."""
        self._over = False
        self._leaving: str | None = None
        self._branch = 0
        self._leaves_alone = False
        """Whether it leaves a job that continues or is preempted: then its end does not complete the job."""
        self._left_alone = False
        """The same, as of the last read of ``leaving``: a later directive does not change how the loop ends."""
        self._aborts: list[Abort] = []
        self._unsettled: list[Entered] = []
        """Generations that began to act since the last step."""
        self._steps = 0
        self._changes: queue.SimpleQueue[tuple[Generation, Change, bool]] = queue.SimpleQueue()
        """What acts next, and whether members only joined: then there is nothing to abort."""
        if starts:
            threading.Thread(target=self._change_loop, name="craft-abort", daemon=True).start()

    # What the guest reads.

    def on_change(self, abort: Abort) -> None:
        with self._change:
            self._aborts.append(abort)

    @property
    def leaving(self) -> str | None:
        with self._change:
            self._left_alone = self._leaving is not None and self._leaves_alone
            return self._leaving

    @property
    def leaves_alone(self) -> bool:
        with self._change:
            return self._leaves_alone or self._left_alone

    @property
    def current(self) -> Generation | None:
        """The newest generation of this worker; None outside of ``craft run``."""
        with self._change:
            return self._current

    @property
    def acting(self) -> Generation | None:
        with self._change:
            return self._acting

    @property
    def branch(self) -> int:
        with self._change:
            return self._branch

    @property
    def steps(self) -> int:
        """Committed steps, by the last ``advance``."""
        return self._steps

    def advance(self, committed: int) -> tuple[Generation | None, list[Entered]]:
        """Record that ``committed`` steps are committed; return what they act under, and what was entered since the last one."""
        with self._change:
            entered, self._unsettled = self._unsettled, []
            self._steps = committed
            return self._acting, entered

    def await_slot(self) -> bool:
        """Block until this worker is in a generation; False if it never will be."""
        with self._change:
            self._change.wait_for(lambda: self._acting is not None or self._over)
            return self._acting is not None

    # What directives change.

    def direct(self, directive: Directive) -> None:
        """Follow a directive; an old or repeated one changes nothing."""
        told = time.time()
        with self._change:
            if directive.restoration is not None:
                self._branch = directive.restoration.branch
            if directive.generation is not None:
                self._follow(directive.generation, told)
            upcoming = directive.upcoming
            if upcoming is not None and self._drops_member(upcoming):
                self._announced = upcoming.number
            elif upcoming is not None:
                # There is no group to prepare: the other members may count on this worker from now on.
                self._follow(upcoming, told)
            left_out = self._is_left_out(upcoming) or self._is_left_out(directive.generation)
            self._leaves_alone = left_out or directive.preempting is not None
            self._leaving = _why_leaving(directive, left_out)
            if self._current is None and (directive.stopping or self._worker_id in directive.released):
                self._over = True
            self._change.notify_all()

    def _is_left_out(self, newer: Generation | None) -> bool:
        """Whether others continue in ``newer`` without this worker: those that leave together do so one by one."""
        current = self._current
        if newer is None or current is None or newer.number <= current.number:
            return False
        return newer.rank_of(self._worker_id) is None

    def _drops_member(self, upcoming: Generation) -> bool:
        """Whether a member is to leave before ``upcoming`` is entered: it begins once that member has left."""
        current = self._current.worker_ids if self._current is not None else ()
        return bool(set(current) - set(upcoming.worker_ids))

    def _follow(self, generation: Generation, told: float) -> None:
        before = self._current
        if generation.rank_of(self._worker_id) is None or (before is not None and generation.number <= before.number):
            return
        self._current = generation
        self._report(generation.number)
        lost = tuple(each for each in before.worker_ids if generation.rank_of(each) is None) if before else ()
        grew = before is None or not (lost or len(generation.members) == len(before.members))
        change = Change(
            generation=generation.number,
            members=generation.worker_ids,
            lost=lost,
            told=told,
            agreed=grew or generation.number == self._announced,
        )
        self._changes.put((generation, change, grew))

    # The abort thread.

    def _change_loop(self) -> None:
        while True:
            generation, change, grew = self._changes.get()
            if not grew:
                self._abort(change)
            entered = self._entered(change, None if grew else time.time())
            self._record(entered)
            with self._change:
                # Both at once: a step counts either before the loss, or as the one that pays for it.
                self._acting = generation
                self._unsettled.append(entered)
                self._change.notify_all()

    def _abort(self, change: Change) -> None:
        logger.warning("%s: aborting the collectives in flight", change.reason)
        with self._change:
            aborts = tuple(self._aborts)
        for abort in aborts:
            try:
                abort(change)
            except Exception:
                # It may be another package's code. The other callbacks must still run, now and next time.
                logger.exception("abort callback %r failed", abort)

    def _entered(self, change: Change, aborted: float | None) -> Entered:
        now = time.time()
        return Entered(
            generation=change.generation,
            time=now,
            told=change.told,
            aborted=aborted,
            met=now,
            entered=now,
            agreed=change.agreed,
            members=change.members,
            lost=change.lost,
            joiners=(),
            idle=(),
            step=self._steps,
            commits=False,
            retried=False,
            given=(),
            mine=(),
            dropped=(),
            guest=True,
        )


def _why_leaving(directive: Directive, left_out: bool) -> str | None:
    if directive.winding_down is not None:
        return directive.winding_down
    if directive.preempting is not None:
        return directive.preempting.reason
    return "it was told to leave" if left_out else None
