"""Whether somebody is started in the place of a lost worker, where the lighthouse is asked first."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from craft.agent.host.worker_pool import WorkerPool
from craft.agent.linux.forkserver import Ended, Fork
from craft.agent.watchdog.watchdog import Watchdog
from craft.decide.job.restart_backoff import AT_ONCE_S
from craft.decide.step.settle import LossAnswer
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

    def __init__(self, pool: WorkerPool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pool = pool
        self.writer = writer
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
        self.pool.ended(ended, worked=True, waited=False, replace=True)


def told(folder: Path, on_loss: LossAnswer, story: Callable[[Host], Awaitable[None]]) -> None:
    """A host with two workers, w0 and w1."""
    chosen = defaults(Loss(LossSettings(answer=on_loss)))
    settings = RunSettings(script="train.py", workers=2, techniques=chosen)

    async def run() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        reader, other = await asyncio.open_connection(sock=theirs)
        pool = WorkerPool(
            settings, RunDir(folder), folder, "key", Watchdog(settings.hang_limits), lambda _: None, lambda: 0
        )
        pool.resume(writer)
        pool.begin(late=False)
        host = Host(pool, reader, writer)
        assert [await host.forked(), await host.forked()] == ["w0", "w1"]
        await story(host)
        pool.close()
        writer.close()
        other.close()

    asyncio.run(run())


def test_with_redo_a_lost_worker_is_replaced_without_a_question(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.loses("w1")
        assert await host.forked() == "w2"

    told(tmp_path, "redo", story)


def test_who_is_lost_while_there_is_no_fork_server_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.pool.forked("w0", 1)
        assert host.pool.pause() == {"w0": 1, "w1": None}
        host.loses("w0")
        host.loses("w1")
        assert host.pool.ended_ids == {"w0", "w1"}
        await host.starts_nobody()
        host.pool.resume(host.writer)
        assert [await host.forked(), await host.forked()] == ["w2", "w3"]

    told(tmp_path, "redo", story)


def test_with_auto_nobody_is_started_before_the_lighthouse_knows_of_the_loss_and_wants_it(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.pool.directed(directive("w0", "w1"))
        host.loses("w1")
        await host.starts_nobody()
        host.pool.directed(directive("w0"))
        assert await host.forked() == "w2"

    told(tmp_path, "auto", story)


def test_with_auto_a_slot_stays_empty_until_the_lighthouse_changes_its_mind(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.loses("w1")
        host.pool.directed(directive("w0", replacing=False))
        await host.starts_nobody()
        host.pool.directed(Directive(sequence=2))
        assert await host.forked() == "w2"

    told(tmp_path, "auto", story)


def test_what_multiprocessing_of_a_killed_worker_left_behind_is_removed(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        (tmp_path / "w1.mp").mkdir()
        (tmp_path / "w1.mp" / "listener-1").touch()
        host.loses("w1")
        assert not (tmp_path / "w1.mp").exists()

    told(tmp_path, "auto", story)


def test_a_worker_for_whom_the_system_gives_no_process_is_asked_for_again_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "workers").mkdir()

    async def story(host: Host) -> None:
        host.pool.forked("w0", 1)
        for _ in range(2):
            host.pool.not_forked("w1", "Resource temporarily unavailable")
            assert await host.forked() == "w1"
        assert not host.pool.all_ended.is_set()
        host.pool.forked("w1", 1)

    told(tmp_path, "redo", story)
    said = [each.getMessage() for each in caplog.records]
    assert [line.partition(".")[0] for line in said] == [
        "w1 cannot be started: Resource temporarily unavailable",
        "w1 was started at last",
    ]


def test_a_job_that_is_over_does_not_wait_for_a_worker_that_never_began(tmp_path: Path) -> None:
    async def story(host: Host) -> None:
        host.pool.not_forked("w0", "Cannot allocate memory")
        host.pool.close()
        assert not host.pool.all_ended.is_set()
        host.pool.not_forked("w1", "Cannot allocate memory")
        assert await host.pool.wait(LIMIT_S)

    told(tmp_path, "redo", story)
