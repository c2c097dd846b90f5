"""Inspect workers of this host for the lighthouse: activity, stacks, collectives.

This works in any state of a worker. The activity page has what its main thread does, ``/proc`` the kernel's view; a thread
of the worker sends its stacks and collectives. If no thread answers, a signal makes the process write its stacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from craft.agent.host.relay import Relay
from craft.agent.watchdog import stacks
from craft.agent.watchdog.watchdog import Regard, Watchdog
from craft.decide.detect import hangs
from craft.protocol.generation_log import Entered
from craft.protocol.values.activity import Phase
from craft.protocol.values.inspection import CloseUp, Collectives, Look, Looked, RecentStep, Stacks
from craft.settings.rundir import RunDir
from craft.telemetry.history import Commit
from craft.telemetry.records.journal import last_lines

_ANSWER_S = 0.5
"""How long to wait for a worker's collectives; one that keeps its GIL does not answer."""
_OWN_S = 1.0
"""How long to wait for a worker's own stacks: longer, since a busy machine delays the answer."""
_GIL_S = 0.5
"""A worker that keeps its GIL for longer is not waited for."""
_LOADS_S = 1.0
"""A worker that loads for longer may wait for a process that it forked."""
MAX_WORKERS = 64
"""Most workers inspected for one question: the answer is one message."""
_STEPS = 10
_MEMBERS = 256
"""Most members of a generation that an answer names: it is about one of them."""
_LONGEST_S = 1.0
"""An inspection delays the end of a worker by at most this."""


@dataclass(frozen=True)
class _Question:
    """A question to one worker, with its state when it was asked."""

    worker_id: str
    regard: Regard
    own: asyncio.Future[Stacks] | None
    told: asyncio.Future[Collectives] | None
    time: float
    generation: int
    members: tuple[str, ...]
    """The members of that generation."""


class WorkerInspector:
    """Asks workers and collects their answers. Lives on the agent's event loop."""

    def __init__(self, watchdog: Watchdog, relay: Relay, run_dir: RunDir) -> None:
        self._watchdog = watchdog
        self._relay = relay
        self._run_dir = run_dir
        self._open: dict[str, int] = {}
        """Open questions, by worker."""
        self._ends: dict[str, Callable[[], None]] = {}
        """What to call once a worker has no open question."""
        self._told: dict[tuple[int, str], asyncio.Future[Collectives]] = {}
        self._own: dict[tuple[int, str], asyncio.Future[Stacks]] = {}
        self._asked = 0
        """Number of this agent's last own question; these count down from 0."""
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, look: Look) -> None:
        """Inspect workers and send the answer. They are asked before this returns: the answer has their state as of now."""
        chosen = [each for each in self._watchdog.worker_ids if not look.worker_ids or each in look.worker_ids]
        questions = [self._ask(look.number, worker_id) for worker_id in chosen[:MAX_WORKERS]]
        task = asyncio.create_task(self._answer(look.number, [each for each in questions if each is not None]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ask(self, number: int, worker_id: str) -> _Question | None:
        regard = self._watchdog.regard(worker_id)
        if regard is None:
            return None
        own: asyncio.Future[Stacks] | None = None
        told: asyncio.Future[Collectives] | None = None
        if regard.view.state != hangs.STOPPED and self._relay.ask_worker(worker_id, Look(number=number)):
            own = self._own[number, worker_id] = asyncio.get_running_loop().create_future()
            told = self._told[number, worker_id] = asyncio.get_running_loop().create_future()
        self._open[worker_id] = self._open.get(worker_id, 0) + 1
        report = self._relay.reports().get(worker_id)
        entered = last_lines(self._run_dir.generations(worker_id), 1, Entered)
        return _Question(
            worker_id=worker_id,
            regard=regard,
            own=own,
            told=told,
            time=time.time(),
            generation=report.generation if report is not None else 0,
            members=entered[-1].members if entered else (),
        )

    def then(self, worker_id: str, end: Callable[[], None]) -> None:
        """Call ``end`` once no inspection of the worker is open, within a limit: an ended worker cannot answer."""
        if worker_id not in self._open:
            end()
        elif worker_id not in self._ends:
            self._ends[worker_id] = end
            asyncio.get_running_loop().call_later(_LONGEST_S, self._end, worker_id)

    def told(self, message: Collectives | Stacks) -> None:
        """Take a worker's answer."""
        open_questions: dict[tuple[int, str], Any] = self._own if isinstance(message, Stacks) else self._told
        waiting = open_questions.get((message.number, message.worker_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def own_stacks(self, worker_id: str) -> str | None:
        """Ask a worker for its stacks; return None if none of its threads answers in time."""
        self._asked -= 1
        place = (self._asked, worker_id)
        if not self._relay.ask_worker(worker_id, Look(number=self._asked)):
            return None
        waiting = self._own[place] = asyncio.get_running_loop().create_future()
        try:
            return await _text(waiting)
        finally:
            del self._own[place]

    async def _answer(self, number: int, questions: list[_Question]) -> None:
        try:
            found = await asyncio.gather(*map(self._close_up, questions))
        finally:
            for question in questions:
                self._told.pop((number, question.worker_id), None)
                self._own.pop((number, question.worker_id), None)
                self._done(question.worker_id)
        await self._relay.send(Looked(number=number, workers=tuple(found)))

    def _done(self, worker_id: str) -> None:
        self._open[worker_id] -= 1
        if not self._open[worker_id]:
            del self._open[worker_id]
            self._end(worker_id)

    def _end(self, worker_id: str) -> None:
        if (end := self._ends.pop(worker_id, None)) is not None:
            end()

    async def _close_up(self, question: _Question) -> CloseUp:
        text = await self._stacks(question)
        told = None
        if question.told is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                told = await asyncio.wait_for(question.told, _ANSWER_S)
        return self._describe(question, text, told)

    async def _stacks(self, question: _Question) -> str:
        regard = question.regard
        keeps = regard.gil_kept_s is not None and regard.gil_kept_s > _GIL_S
        own = await _text(question.own) if question.own is not None and not keeps else None
        if own is None:
            # Only now: a signal handler that walks the frames of a running process can crash it.
            return await stacks.dump(regard.pid, regard.stacks)
        if regard.doing is not None and regard.doing.phase is Phase.LOADING and (regard.since_s or 0.0) > _LOADS_S:
            return await stacks.with_children(own, regard.pid, regard.stacks)
        return own

    def _describe(self, question: _Question, text: str, told: Collectives | None) -> CloseUp:
        worker_id, regard, members = question.worker_id, question.regard, question.members
        doing = regard.doing
        commits = last_lines(self._run_dir.steps(worker_id), 2 * _STEPS, Commit)
        return CloseUp(
            worker_id=worker_id,
            host=self._relay.report.host,
            pid=regard.pid,
            time=question.time,
            state=regard.view.words,
            stopped=regard.view.state == hangs.STOPPED,
            phase=doing.phase.word if doing is not None else "",
            doing=doing.words if doing is not None else "has not said anything yet",
            since_s=None if regard.since_s is None else round(regard.since_s, 3),
            step=doing.step if doing is not None else None,
            microbatch=doing.microbatch if doing is not None else None,
            gil_kept_s=None if regard.gil_kept_s is None else round(regard.gil_kept_s, 3),
            generation=question.generation,
            rank=members.index(worker_id) if worker_id in members else None,
            members=members[:_MEMBERS],
            recent_steps=_recent([each for each in commits if each.time <= question.time]),
            stacks=text,
            collectives=told if told is not None and told.rank is not None else None,
            **_slot(commits),
        )


async def _text(waiting: asyncio.Future[Stacks]) -> str | None:
    try:
        return (await asyncio.wait_for(waiting, _OWN_S)).text
    except asyncio.TimeoutError:
        return None


def _slot(commits: list[Commit]) -> dict[str, Any]:
    """Return the replica and position that a worker wrote with its last commit."""
    if not commits or commits[-1].replica is None:
        return {}
    last = commits[-1]
    return {"replica": last.replica, "position": last.position, "mates": last.mates}


def _elapsed_s(earlier: Commit | None, commit: Commit) -> float | None:
    """Return the time since the commit before; None without one, or if the clock was set back in between."""
    if earlier is None or commit.time < earlier.time:
        return None
    return round(commit.time - earlier.time, 6)


def _recent(commits: list[Commit]) -> tuple[RecentStep, ...]:
    before = [None, *commits]
    found = [
        RecentStep(
            step=commit.step,
            generation=commit.generation,
            time=commit.time,
            elapsed_s=_elapsed_s(earlier, commit),
            microbatches=commit.microbatches,
        )
        for earlier, commit in zip(before, commits, strict=False)
    ]
    return tuple(found[-_STEPS:])
