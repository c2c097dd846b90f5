"""Asks agents what their workers are doing, and waits for the answers: for ``GET /v1/workers/{worker_id}/debug`` and bundles."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec.structs import replace

from craft.control.loop import Loop
from craft.decide.policies.hang import EXCHANGING
from craft.protocol.debug import CloseUp, Look, Looked
from craft.wire.codec import encode

LIMIT_S = 4.0
"""An agent gives each process half a second, and a worker may have forked some."""
MAX_OPEN = 64
"""Questions that wait for an answer, in all."""


class Line(Protocol):
    """A connection to an agent."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    async def say(self, data: str) -> None:
        """Send a message."""


class Unanswered(Exception):
    """The agent does not answer; the message says why, for people."""


class Busy(Exception):
    """Too many questions are open."""


class Looks:
    """Lives on the lighthouse's event loop."""

    def __init__(self, loop: Loop, lines: Callable[[], Mapping[str, Line]]) -> None:
        """``lines`` gives the newest connection of each host."""
        self.limit_s = LIMIT_S
        """How long an answer is waited for."""
        self._loop = loop
        self._lines = lines
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[str, asyncio.Future[tuple[CloseUp, ...]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, host: str, worker_ids: tuple[str, ...] = ()) -> asyncio.Future[tuple[CloseUp, ...]]:
        """Ask the agent of ``host``; the question is on its way before anything that is sent later."""
        line = self._lines().get(host)
        if line is None or line.closed:
            raise Unanswered(f"the agent of host {host} is not connected: ask again when it is back")
        if len(self._open) >= MAX_OPEN:
            raise Busy
        number = next(self._numbers)
        answer: asyncio.Future[tuple[CloseUp, ...]] = asyncio.get_running_loop().create_future()
        self._open[number] = (host, answer)
        answer.add_done_callback(lambda _: self._open.pop(number, None))
        task = asyncio.create_task(_say(line, encode(Look(number=number, worker_ids=worker_ids)).decode()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    def took(self, host: str, message: Looked) -> None:
        """An agent has answered; late answers, and those of others, are nobody's."""
        asked, answer = self._open.get(message.number, ("", None))
        if answer is not None and asked == host and not answer.done():
            answer.set_result(tuple(map(self._with_waits, message.workers)))

    async def look(self, worker_id: str, host: str) -> CloseUp:
        """Return one worker from close up."""
        try:
            found = await asyncio.wait_for(self.ask(host, (worker_id,)), self.limit_s)
        except asyncio.TimeoutError:
            raise Unanswered(f"the agent of host {host} did not answer within {self.limit_s:g} s") from None
        own = next((each for each in found if each.worker_id == worker_id), None)
        if own is None:
            raise Unanswered(f"the agent of host {host} has no process of worker {worker_id} any more")
        return own

    def _with_waits(self, found: CloseUp) -> CloseUp:
        """Who keeps it waiting, as far as the lighthouse knows: members that are not in the exchange, or are behind."""
        reports = self._loop.reports
        own = reports.get(found.worker_id)
        if found.phase != EXCHANGING or own is None:
            return found
        others = [reports[each] for each in found.members if each != found.worker_id and each in reports]
        waits_for = tuple(
            other.member.worker_id for other in others if other.phase != EXCHANGING or other.step < own.step
        )
        return replace(found, waits_for=waits_for)


async def _say(line: Line, data: str) -> None:
    # A connection that ends meanwhile is noticed by its receiving side; whoever asked waits in vain.
    with contextlib.suppress(ConnectionError):
        await line.say(data)
