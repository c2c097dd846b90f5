"""A host that is told to make room, with real files and a real event loop; what is wished is in its next report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from craft.agent.host.preemption import HostPreemption, PreemptFile
from craft.agent.host.relay import Relay
from craft.agent.host.worker_pool import WorkerPool
from craft.agent.watchdog.watchdog import Watchdog
from craft.decide.techniques import Checkpoints, CheckpointSettings, Preemption, PreemptionSettings, defaults
from craft.protocol.membership import Member
from craft.protocol.messages import Directive, WorkerReport
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir

LIMIT_S = 10.0
DRAIN_LIMIT_S = 30.0
TECHNIQUES = defaults(
    Checkpoints(CheckpointSettings(url="store")), Preemption(PreemptionSettings(limit_s=DRAIN_LIMIT_S))
)

IN_A_HURRY = defaults(Checkpoints(CheckpointSettings(url="store")), Preemption(PreemptionSettings(limit_s=0.0)))
NOWHERE = defaults(Preemption(PreemptionSettings(limit_s=DRAIN_LIMIT_S)))


class Host:
    """A host without workers; ``gave_up`` and ``made`` are what it was told to call."""

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        self.relay = Relay("h1", "http://nowhere", "token", lambda _: None)
        pool = WorkerPool(
            settings, RunDir(folder), folder, "key", Watchdog(settings.hang_limits), lambda _: None, lambda: 0
        )
        self.gave_up: list[str] = []
        self.made: list[str] = []
        self.room = HostPreemption(self.relay, pool, settings, self.made.append)

    async def watch(self, file: PreemptFile, limit_s: float = LIMIT_S) -> None:
        await asyncio.wait_for(self.room.watch(file, self.gave_up.append), limit_s)

    @property
    def seconds(self) -> float:
        """How long the job has, as of now."""
        wanted = self.relay.report.preempting
        assert wanted is not None
        assert wanted.deadline is not None
        return wanted.deadline - time.time()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def saves(**more: Any) -> RunSettings:
    return RunSettings(script="train.py", techniques=TECHNIQUES, **more)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12.5\n", 12.5), ("", DRAIN_LIMIT_S), ("soon", DRAIN_LIMIT_S), ("nan", DRAIN_LIMIT_S), ("-3", 0.0)],
)
def test_a_file_says_how_long_the_job_has(tmp_path: Path, text: str, seconds: float) -> None:
    path = tmp_path / "room"

    async def story() -> None:
        host = Host(tmp_path, saves())
        file = PreemptFile(path)
        path.write_text(text)
        await host.watch(file)
        assert host.seconds == pytest.approx(seconds, abs=1.0)
        assert host.relay.report.preempting is not None
        assert host.relay.report.preempting.reason == f"the file {path} appeared"
        assert host.gave_up == []

    run(story())


def test_a_file_that_was_there_before_counts_when_it_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "room"
    path.write_text("5")

    async def story() -> None:
        host = Host(tmp_path, saves())
        file = PreemptFile(path)
        with pytest.raises(asyncio.TimeoutError):
            await host.watch(file, limit_s=1.0)
        assert host.relay.report.preempting is None
        path.write_text("90")
        await host.watch(file)
        assert host.seconds > 80

    run(story())


def test_without_checkpoints_a_file_leaves_nothing_to_wait_for(tmp_path: Path) -> None:
    path = tmp_path / "room"

    async def story() -> None:
        host = Host(tmp_path, replace(saves(), techniques=NOWHERE))
        file = PreemptFile(path)
        path.touch()
        await host.watch(file)
        assert host.gave_up == [f"the file {path} appeared, and the job takes no checkpoints"]

    run(story())


def test_the_first_sigterm_is_a_wish_and_the_second_one_is_not(tmp_path: Path) -> None:
    async def story() -> None:
        host = Host(tmp_path, saves())
        assert host.room.on_sigterm()
        assert host.seconds == pytest.approx(DRAIN_LIMIT_S, abs=1.0)
        assert not host.room.on_sigterm()

    run(story())


def test_sigterm_ends_a_job_at_once_that_takes_no_checkpoints_or_ends_already(tmp_path: Path) -> None:
    async def story() -> None:
        none = Host(tmp_path, replace(saves(), techniques=NOWHERE))
        assert not none.room.on_sigterm()
        ending = Host(tmp_path, saves())
        ending.relay.directive = Directive(sequence=1, winding_down="enough")
        assert not ending.room.on_sigterm()
        assert ending.relay.report.preempting is None

    run(story())


def test_a_script_that_asks_for_checkpoints_by_itself_is_saved_too(tmp_path: Path) -> None:
    async def story() -> None:
        host = Host(tmp_path, replace(saves(), techniques=NOWHERE))
        host.relay.take(WorkerReport(member=Member(worker_id="w0"), pid=1, checkpoints=True))
        assert host.room.on_sigterm()

    run(story())


def test_without_a_lighthouse_the_host_ends_by_itself_soon_after_the_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        host = Host(tmp_path, replace(saves(), techniques=IN_A_HURRY))
        assert host.room.on_sigterm()
        deadline = time.monotonic() + LIMIT_S
        while not host.made and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert host.made == ["preempted (SIGTERM): no lighthouse ended the job until the deadline"]

    run(story())
