"""Ask agents what their workers do: for ``GET /v1/workers/{worker_id}/debug`` and hang bundles."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec.structs import replace

from craft.control.core.loop import Loop
from craft.decide.policies.detected import EXCHANGING
from craft.protocol.values.inspection import CloseUp, Look, Looked
from craft.wire.codec import encode

LIMIT_S = 4.0
"""An agent gives each process half a second, and a worker may have forked several."""
MAX_OPEN = 64
"""Most open questions."""


_MAX_AWAITED = 32

Doing = Mapping[str, tuple[str, int]]
"""By member: its phase and its committed steps."""


class AgentLink(Protocol):
    """A connection to an agent."""

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    async def say(self, data: str) -> None:
        """Send a message."""


class Unanswered(Exception):
    """The agent does not answer; the message says why."""


class Busy(Exception):
    """Too many questions are open."""


class Inspections:
    """Lives on the lighthouse's event loop."""

    def __init__(self, loop: Loop, lines: Callable[[], Mapping[str, AgentLink]]) -> None:
        """``lines`` returns the newest connection of each host."""
        self.limit_s = LIMIT_S
        """How long to wait for an answer."""
        self._loop = loop
        self._lines = lines
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[str, asyncio.Future[tuple[CloseUp, ...]], Doing]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def doing(self) -> Doing:
        """Return what each member does now; when the answer comes, all may have moved on."""
        report_events = self._loop.report_events
        return {
            worker_id: (seen.report.phase, seen.report.step)
            for worker_id, seen in report_events.seen.items()
            if report_events.index.takes_part(worker_id)
        }

    def ask(self, host: str, doing: Doing, worker_ids: tuple[str, ...] = ()) -> asyncio.Future[tuple[CloseUp, ...]]:
        """Ask the agent of ``host``; the question is sent before any later message."""
        line = self._lines().get(host)
        if line is None or line.closed:
            raise Unanswered(f"the agent of host {host} is not connected: ask again when it is back")
        if len(self._open) >= MAX_OPEN:
            raise Busy
        number = next(self._numbers)
        answer: asyncio.Future[tuple[CloseUp, ...]] = asyncio.get_running_loop().create_future()
        self._open[number] = (host, answer, doing)
        answer.add_done_callback(lambda _: self._open.pop(number, None))
        task = asyncio.create_task(_say(line, encode(Look(number=number, worker_ids=worker_ids)).decode()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    def took(self, host: str, message: Looked) -> None:
        """Take in an agent's answer; ignore late and foreign ones."""
        asked = self._open.get(message.number)
        if asked is not None and asked[0] == host and not asked[1].done():
            asked[1].set_result(tuple(_with_waits(each, asked[2]) for each in message.workers))

    async def look(self, worker_id: str, host: str) -> CloseUp:
        """Inspect one worker."""
        try:
            found = await asyncio.wait_for(self.ask(host, self.doing(), (worker_id,)), self.limit_s)
        except asyncio.TimeoutError:
            raise Unanswered(f"the agent of host {host} did not answer within {self.limit_s:g} s") from None
        own = next((each for each in found if each.worker_id == worker_id), None)
        if own is None:
            raise Unanswered(f"the agent of host {host} has no process of worker {worker_id} any more")
        return own


def _with_waits(found: CloseUp, doing: Doing) -> CloseUp:
    """Return who blocks it, as far as known: members that are not in the exchange, or are behind."""
    if found.phase != EXCHANGING or found.worker_id not in doing:
        return found
    _, step = doing[found.worker_id]
    waits_for = [
        other
        for other, (phase, reached) in doing.items()
        if other != found.worker_id and (phase != EXCHANGING or reached < step)
    ]
    return replace(found, waits_for=tuple(waits_for[:_MAX_AWAITED]))


async def _say(line: AgentLink, data: str) -> None:
    # The receiving side notices the end of a connection; the question then times out.
    with contextlib.suppress(ConnectionError):
        await line.say(data)
