"""A *guest*: a worker whose loop and groups belong to another framework, such as torchft or Lightning's strategies.

It is a member of the job like any other: it joins, enters generations, reports its steps, is watched, declared lost, drained
and replaced. It opens no CRAFT group. It passes on what its framework cannot know: that a member is gone, so that blocked
collectives can be aborted at once (``on_change``), and that this worker is to leave (``leaving``). Promises P1 to P4 depend on
the framework.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

from craft.protocol.errors import StateLost
from craft.protocol.events import CheckpointWritten, ConditionSeen
from craft.protocol.messages import Directive
from craft.settings.worker import WorkerSettings
from craft.worker.external import external_store
from craft.worker.external.blocked_tracker import BlockedTracker
from craft.worker.external.generation_follower import Abort, GenerationFollower
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel
from craft.worker.report.metrics import checked
from craft.worker.report.reporter import EventOutbox
from craft.worker.report.step_log import Committed, StepAccount

logger = logging.getLogger(__name__)

FREE_LIMIT_S = 10.0
"""A blocked thread usually returns within milliseconds; a busy machine may need seconds."""
_END_LIMIT_S = 60.0
"""How long a guest that called ``begin_again`` waits to be ended with all others."""
_REPEAT_S = 0.2
_MAX_WHAT_CHARS = 100
_MAX_DETAIL_CHARS = 1000


class Guest:
    """What ``craft.attend()`` returns. Any thread may call its methods, except ``step``, which belongs to one thread."""

    def __init__(self, settings: WorkerSettings, channel: Channel | None, activity: ActivityPage) -> None:
        self._settings = settings
        self._channel = channel
        self._blocked = BlockedTracker(activity)
        self._notes = EventOutbox(self._report)
        self._account = StepAccount(
            settings.run_dir if channel is not None else None,
            settings.worker_id,
            self._notes.add,
            lambda step, microbatch: None,
            lambda trouble: self._report(unwritten=trouble),
        )
        self._generations = GenerationFollower(
            settings.worker_id,
            lambda number: self._report(generation=number),
            self._account.entered,
            starts=channel is not None,
        )
        self._gave_up = False
        """Whether it reported that no member can continue, and has not stepped since."""

    # What the framework asks.

    def on_change(self, abort: Abort) -> None:
        """Call ``abort`` with every change from now on, within moments, on the thread ``craft-abort``."""
        self._generations.on_change(abort)

    @property
    def leaving(self) -> str | None:
        """Why this worker is to leave its loop at the next safe point and end; None: stay. Read it in every step."""
        return self._generations.leaving

    @property
    def worker_id(self) -> str:
        return self._settings.worker_id

    @property
    def generation(self) -> int:
        """The newest generation of this worker; 0 outside of ``craft run``."""
        current = self._generations.current
        return current.number if current is not None else 0

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of that generation, in the order of their ranks; outside of ``craft run`` this one alone."""
        current = self._generations.current
        return current.worker_ids if current is not None else (self.worker_id,)

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that torchrun would set, for the generation that this worker acts under."""
        acting = self._generations.acting
        return external_store.variables(acting, self.worker_id) if acting is not None else {}

    # What the framework reports.

    def tell(self, technique: str, what: str, value: float | None = None, detail: str = "") -> None:
        """Report an observation as ``ConditionSeen``, for the journal and its policies; any thread may call it."""
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
        """Report that the framework completed a checkpoint: a restarted job begins from it."""
        branch = self._generations.branch
        self._notes.add(CheckpointWritten(name=name, branch=branch, step=step, url=place, total_bytes=total_bytes))

    def begin_again(self) -> None:
        """Restart the job from its last checkpoint in new processes: no member of this generation can continue.

        Without a checkpoint, or where no agent starts replacements, the job ends and says so. It may be called again.
        Returns at once: a script that then reaches its end waits there to be ended, and does not count as finished.
        """
        self._gave_up = True
        self._report(state_gone=self.generation)

    def step(self, committed: int, /, **metrics: float) -> None:
        """Report ``committed`` steps in all, for the watchdog, ``craft status`` and ``steps.jsonl``."""
        logged = {name: float(value) for name, value in checked("guest.step", metrics).items()}
        acting, entered = self._generations.advance(committed)
        self._gave_up = False
        self._blocked.stepped(committed)
        for each in entered:
            self._account.settled(each)
        number, members = (acting.number, acting.worker_ids) if acting else (0, (self.worker_id,))
        self._account.committed(
            Committed(step=committed - 1, branch=0, generation=number, members=members, plan=(), metrics=logged)
        )
        self._report(urgent=False, step=committed, metrics=logged, step_s=self._account.step_s)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Mark a wait for other workers: it tells a worker that hangs from those that wait for it."""
        self.exchange_began()
        try:
            yield
        finally:
            self.exchange_ended()

    def exchange_began(self) -> None:
        """Mark the begin of a wait for other workers; any thread may call it, several times."""
        self._blocked.exchange_began()

    def exchange_ended(self) -> None:
        """Mark the end of one such wait, however it ended."""
        self._blocked.exchange_ended()

    def paused(self, reason: str) -> AbstractContextManager[None]:
        """Pause the watchdog for this worker, however long the block takes."""
        return self._blocked.paused(reason)

    def free_or_end(self, limit_s: float = FREE_LIMIT_S) -> None:
        """End this process if a thread is still in its collective after ``limit_s``; call it at the end of ``abort``.

        The agent then starts a replacement. Returns at once. A process that computes is left alone.
        """
        if self._channel is not None:
            self._blocked.free_or_end(limit_s)

    def finish(self) -> None:
        """End this guest: its script is over. Called by what ran the script."""
        if self._gave_up:
            self._await_end()
        self._blocked.end()
        self._account.complete()
        if self._generations.leaves_alone:
            logger.info("leaving the job as ordered")
            self._report(left=True)
        else:
            # Without a digest: the state belongs to the framework, and no worker compared it.
            self._report(complete=True)

    def _await_end(self) -> NoReturn:
        """Wait to be ended with all others; give up the generations that are made meanwhile, too."""
        deadline = time.monotonic() + _END_LIMIT_S
        with self.paused("the job is to begin again"):
            while time.monotonic() < deadline:
                self.begin_again()
                time.sleep(_REPEAT_S)
        raise StateLost(f"guest.begin_again(): the job did not begin again within {_END_LIMIT_S:g} s")

    @property
    def place(self) -> int | None:
        """The step that it is in; None before the first commit."""
        return self._generations.steps or None

    def _report(self, *, urgent: bool = True, **changes: object) -> None:
        if self._channel is not None:
            self._channel.report(urgent=urgent, **changes)

    # What the channel's thread calls.

    def await_slot(self) -> bool:
        """Block until this worker is in a generation; False if it never will be."""
        return self._generations.await_slot()

    def direct(self, directive: Directive) -> None:
        """Follow a directive; an old or repeated one changes nothing."""
        self._generations.direct(directive)
