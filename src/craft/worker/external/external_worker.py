"""A *guest*: a worker whose loop and groups are not CRAFT's, such as those of torchft or of Lightning's own strategies.

It is a member of the job like any other: it joins, enters generations, reports its steps, is watched, declared lost, drained
and replaced. It opens no group of CRAFT's. What its framework cannot know by itself it is told: that somebody is gone, so
that whatever is blocked can be aborted at once (``abort``, on a thread of its own), and that it is to leave (``leaving``).

Enters: directives, on the channel's thread (``direct``). Leaves: reports, and the lines of ``steps.jsonl`` and
``generations.jsonl``. Promises P1 to P4 are the framework's to keep, or not.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import msgspec

from craft.protocol.errors import StateLost
from craft.protocol.events import CheckpointWritten, ConditionSeen
from craft.protocol.generation_log import Entered
from craft.protocol.membership import Generation
from craft.protocol.messages import Directive
from craft.settings.worker import WorkerSettings
from craft.worker.external import external_store
from craft.worker.external.blocked_tracker import BlockedTracker
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel
from craft.worker.report.event_outbox import EventOutbox
from craft.worker.report.metrics import checked
from craft.worker.report.step_account import StepAccount
from craft.worker.report.step_log import Committed

logger = logging.getLogger(__name__)

FREE_LIMIT_S = 10.0
"""Who is blocked comes out within milliseconds, as a rule; a busy machine may need seconds."""
_END_LIMIT_S = 60.0
"""So long one that had the job begin again waits to be ended with all others."""
_INSIST_S = 0.2
_MAX_WHAT_CHARS = 100
_MAX_DETAIL_CHARS = 1000


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A generation in which somebody is missing, or which was made for everybody to abort."""

    generation: int
    members: tuple[str, ...]
    """In the order of their ranks."""
    lost: tuple[str, ...]
    """Members of the generation before that are not in this one: lost, or gone as they were told; none where all are to
    abort by order."""
    told: float
    """When this worker heard of it, in seconds since 1970."""
    agreed: bool = False
    """Whether it had been told before that somebody would leave: nothing failed."""

    @property
    def reason(self) -> str:
        """For people: ``w1 is not in generation 3``."""
        if not self.lost:
            return f"all members are to abort what they are in, and go on in generation {self.generation}"
        verb = "is" if len(self.lost) == 1 else "are"
        return f"{', '.join(self.lost)} {verb} not in generation {self.generation}"


Abort = Callable[[Change], None]


class Guest:
    """What ``craft.attend()`` returns. Any thread may call its methods, except for ``step``, which belongs to one."""

    def __init__(self, settings: WorkerSettings, channel: Channel | None, activity: ActivityPage) -> None:
        self._settings = settings
        self._channel = channel
        self._blocked = BlockedTracker(activity)
        run_dir = settings.run_dir if channel is not None else None
        self._notes = EventOutbox(self._report)
        self._account = StepAccount(
            run_dir,
            settings.worker_id,
            self._notes.add,
            lambda step, microbatch: None,
            lambda trouble: self._report(unwritten=trouble),
        )
        # Guards what follows: the channel's thread and those of the script meet here.
        self._change = threading.Condition()
        self._generation: Generation | None = None
        self._announced = 0
        """The upcoming generation before which somebody is to leave."""
        self._over: str | None = None
        self._leaving: str | None = None
        self._branch = 0
        self._goes_alone = False
        """Whether it leaves a job that goes on, or that makes room: to end is not to finish then."""
        self._leaves_alone = False
        """The same, as of when the loop last asked: by that it ends, whatever comes while it does."""
        self._gave_up = False
        """Whether it has said that nobody can go on, and has not gone on itself since then."""
        self._aborts: list[Abort] = []
        self._acts: Generation | None = None
        """The generation that steps are written down under: the one before until what was under way there is aborted."""
        self._unsettled: list[Entered] = []
        """Generations that came to act since the last step."""
        self._steps = 0
        self._changes: queue.SimpleQueue[tuple[Generation, Change, bool]] = queue.SimpleQueue()
        """What is to act next, and whether somebody joined and nothing else: then there is nothing to abort."""
        if channel is not None:
            threading.Thread(target=self._change_loop, name="craft-abort", daemon=True).start()

    # What it is told.

    def on_change(self, abort: Abort) -> None:
        """Call ``abort`` with every change from now on, within moments, on a thread of its own."""
        with self._change:
            self._aborts.append(abort)

    @property
    def leaving(self) -> str | None:
        """Why this worker is to leave its loop at the next safe point and end; None: it is not. To be asked again and again."""
        with self._change:
            self._leaves_alone = self._leaving is not None and self._goes_alone
            return self._leaving

    @property
    def worker_id(self) -> str:
        return self._settings.worker_id

    @property
    def generation(self) -> int:
        """The generation that this worker acts under; 0 outside of ``craft run``."""
        with self._change:
            return self._generation.number if self._generation is not None else 0

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of that generation, in the order of their ranks; outside of ``craft run`` this one alone."""
        with self._change:
            return self._generation.worker_ids if self._generation is not None else (self.worker_id,)

    @property
    def variables(self) -> Mapping[str, str]:
        """What torchrun would tell a worker in its environment, of the generation that this one acts under."""
        with self._change:
            return external_store.variables(self._acts, self.worker_id) if self._acts is not None else {}

    # What it tells.

    def tell(self, technique: str, what: str, value: float | None = None, detail: str = "") -> None:
        """Have something noticed reach the journal, and the policies there, as ``ConditionSeen``; any thread may."""
        self._notes.add(
            ConditionSeen(
                technique=technique,
                what=what[:_MAX_WHAT_CHARS],
                worker_id=self.worker_id,
                host=self._settings.host,
                value=value,
                detail=detail[:_MAX_DETAIL_CHARS],
                time=time.time(),
            )
        )

    def saved(self, name: str, step: int, place: str, total_bytes: int = 0) -> None:
        """A checkpoint of the framework's own is complete: from it the job begins again where it has to."""
        written = CheckpointWritten(name=name, branch=self._branch, step=step, url=place, total_bytes=total_bytes)
        self._notes.add(written)

    def begin_again(self) -> None:
        """Nobody of this generation can go on: have the job begin again from what was saved last, in new processes.

        Without a checkpoint, or where nobody is started in the place of others, the job ends and says so. Can be repeated.
        Returns at once: a script that then comes to its end waits there to be ended, and has not finished.
        """
        with self._change:
            self._gave_up = True
        self._report(state_gone=self.generation)

    def step(self, committed: int, /, **metrics: float) -> None:
        """So many steps are committed by now: progress for the watchdog, ``craft status`` and ``steps.jsonl``."""
        logged = {name: float(value) for name, value in checked("guest.step", metrics).items()}
        with self._change:
            entered, self._unsettled = self._unsettled, []
            number, members = (self._acts.number, self._acts.worker_ids) if self._acts else (0, (self.worker_id,))
            self._steps = committed
            self._gave_up = False
        self._blocked.stepped(committed)
        for each in entered:
            self._account.settled(each)
        self._account.committed(
            Committed(step=committed - 1, branch=0, generation=number, members=members, plan=(), metrics=logged)
        )
        self._report(urgent=False, step=committed, metrics=logged, step_s=self._account.step_s)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Within it this worker waits for others. That is how one that hangs is told from those who wait for it."""
        self.exchange_began()
        try:
            yield
        finally:
            self.exchange_ended()

    def exchange_began(self) -> None:
        """Something was begun that ends when others do their part; any thread may say so, and several times."""
        self._blocked.exchange_began()

    def exchange_ended(self) -> None:
        """One of them ended, by whatever way."""
        self._blocked.exchange_ended()

    def paused(self, reason: str) -> AbstractContextManager[None]:
        """Within it this worker is never taken for one that hangs, however long it takes."""
        return self._blocked.paused(reason)

    def free_or_end(self, limit_s: float = FREE_LIMIT_S) -> None:
        """For an ``abort`` that has done what frees: who is in an exchange now comes out of it, or this process ends.

        That is for its agent, which starts another one in its place. Returns at once; a process that computes is let be.
        """
        if self._channel is not None:
            self._blocked.free_or_end(limit_s)

    def finish(self) -> None:
        """The script came to its end. Called by whoever ran it."""
        if self._gave_up:
            self._await_end()
        self._blocked.end()
        self._account.complete()
        with self._change:
            alone = self._goes_alone or self._leaves_alone
        if alone:
            logger.info("leaves the job, as it was told")
            self._report(left=True)
        else:
            # Without a digest: the state is the framework's, and nobody has compared it.
            self._report(complete=True)

    def _await_end(self) -> NoReturn:
        """Be ended with all others. A generation that was made meanwhile is given up like the one before."""
        deadline = time.monotonic() + _END_LIMIT_S
        with self.paused("the job is to begin again"):
            while time.monotonic() < deadline:
                self.begin_again()
                time.sleep(_INSIST_S)
        raise StateLost(f"guest.begin_again(): the job did not begin again within {_END_LIMIT_S:g} s")

    @property
    def place(self) -> int | None:
        """The step that it is in; None before the first one was committed."""
        return self._steps or None

    def _report(self, *, urgent: bool = True, **changes: object) -> None:
        if self._channel is not None:
            self._channel.report(urgent=urgent, **changes)

    # Generations.

    def await_slot(self) -> bool:
        """Block until this worker is in a generation; False if it never will be."""
        with self._change:
            self._change.wait_for(lambda: self._acts is not None or self._over is not None)
            return self._acts is not None

    def direct(self, directive: Directive) -> None:
        """Follow a directive; an old or repeated one changes nothing."""
        told = time.time()
        with self._change:
            if directive.restoration is not None:
                self._branch = directive.restoration.branch
            if directive.generation is not None:
                self._follow(directive.generation, told)
            upcoming = directive.upcoming
            if upcoming is not None and self._leaves(upcoming):
                self._announced = upcoming.number
            elif upcoming is not None:
                # There is no group to prepare: whoever is in it may count on this one from now on.
                self._follow(upcoming, told)
            left_out = self._left_out(upcoming) or self._left_out(directive.generation)
            self._goes_alone = left_out or directive.preempting is not None
            self._leaving = _why(directive, left_out)
            if self._generation is None and (directive.stopping or self.worker_id in directive.released):
                self._over = directive.reason or "the job is over"
            self._change.notify_all()

    def _left_out(self, newer: Generation | None) -> bool:
        """Whether others go on in ``newer``, without this one: those who leave together do so one after the other."""
        current = self._generation
        if newer is None or current is None or newer.number <= current.number:
            return False
        return newer.rank_of(self.worker_id) is None

    def _leaves(self, upcoming: Generation) -> bool:
        """Whether somebody is to leave before it is entered: then it begins when that one has left, not before."""
        current = self._generation.worker_ids if self._generation is not None else ()
        return bool(set(current) - set(upcoming.worker_ids))

    def _follow(self, generation: Generation, told: float) -> None:
        before = self._generation
        if generation.rank_of(self.worker_id) is None or (before is not None and generation.number <= before.number):
            return
        self._generation = generation
        self._report(generation=generation.number)
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

    def _change_loop(self) -> None:
        while True:
            generation, change, grew = self._changes.get()
            if not grew:
                self._abort(change)
            entered = self._entered(change, None if grew else time.time())
            self._account.entered(entered)
            with self._change:
                # At once: a step is either before what was lost, or pays for it.
                self._acts = generation
                self._unsettled.append(entered)
                self._change.notify_all()

    def _abort(self, change: Change) -> None:
        logger.warning("%s: what is under way here is aborted", change.reason)
        with self._change:
            aborts = tuple(self._aborts)
        for abort in aborts:
            try:
                abort(change)
            except Exception:
                # Of another package's code, perhaps: the others must still be called, and the next time, too.
                logger.exception("%r failed to abort", abort)

    def _entered(self, change: Change, aborted: float | None = None) -> Entered:
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


def _why(directive: Directive, left_out: bool) -> str | None:
    if directive.winding_down is not None:
        return directive.winding_down
    if directive.preempting is not None:
        return directive.preempting.reason
    return "it was told to leave" if left_out else None
