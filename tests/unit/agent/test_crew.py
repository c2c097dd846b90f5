"""Whether somebody is started in the place of a lost worker, where the lighthouse is asked first."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from craft.agent.crew import Crew
from craft.agent.forkserver import Ended, Fork
from craft.agent.watch import Watchdog
from craft.decide.restarts import AT_ONCE_S
from craft.decide.settle import LossAnswer
from craft.decide.techniques import Loss, LossSettings, defaults
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Directive
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir

LIMIT_S = 5.0


def directive(*members: str, replacing: bool = True) -> Directive:
    generation = Generation(number=1, nonce="n", members=tuple(Member(worker_id=each) for each in members))
    return Directive(sequence=1, generation=generation, replacing=replacing)


class Host:
    """A crew whose fork server is this test."""

    def __init__(self, crew: Crew, reader: asyncio.StreamReader) -> None:
        self.crew = crew
        self._reader = reader

    async def forked(self) -> str:
        """The next worker that is to be started."""
        line = await asyncio.wait_for(self._reader.readline(), LIMIT_S)
        return msgspec.json.decode(line, type=Fork).worker_id

    async def starts_nobody(self) -> None:
        """For longer than it would take to start somebody."""
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(self._reader.readexactly(1), 3 * AT_ONCE_S)

    def loses(self, worker_id: str) -> None:
        ended = Ended(worker_id=worker_id, exit_code=None, signal=9, time=0.0)
        self.crew.ended(ended, worked=True, replace=True)


def told(folder: Path, on_loss: LossAnswer, story: Callable[[Host], Awaitable[None]]) -> None:
    """A host with two workers, w0 and w1."""
    chosen = defaults(Loss(LossSettings(answer=on_loss)))
    settings = RunSettings(script="train.py", workers=2, techniques=chosen)

    async def run() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        reader, other = await asyncio.open_connection(sock=theirs)
        crew = Crew(settings, RunDir(folder), folder, "key", Watchdog(settings.hang_limits), lambda _: None, lambda: 0)
        crew.begin(writer, late=False)
        host = Host(crew, reader)
        assert [await host.forked(), await host.forked()] == ["w0", "w1"]
        await story(host)
        crew.close()
        writer.close()
        other.close()

    asyncio.run(run())


def test_with_redo_a_lost_worker_is_replaced_without_a_question(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.loses("w1")
        assert await host.forked() == "w2"

    told(tmp_path, "redo", story)


def test_with_auto_nobody_is_started_before_the_lighthouse_knows_of_the_loss_and_wants_it(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.crew.directed(directive("w0", "w1"))
        host.loses("w1")
        await host.starts_nobody()
        host.crew.directed(directive("w0"))
        assert await host.forked() == "w2"

    told(tmp_path, "auto", story)


def test_with_auto_a_slot_stays_empty_until_the_lighthouse_changes_its_mind(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.loses("w1")
        host.crew.directed(directive("w0", replacing=False))
        await host.starts_nobody()
        host.crew.directed(Directive(sequence=2))
        assert await host.forked() == "w2"

    told(tmp_path, "auto", story)
