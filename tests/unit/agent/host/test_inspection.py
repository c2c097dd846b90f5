"""An agent answers what the lighthouse asks about workers that hang in real ways, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from craft.agent.host.inspection import WorkerInspector
from craft.agent.host.relay import Relay
from craft.agent.watchdog.watchdog import Watchdog
from craft.decide.detect.hangs import HangLimits
from craft.protocol.membership import Member
from craft.protocol.messages import WorkerReport
from craft.protocol.values.inspection import CloseUp, Look, Looked
from craft.settings.rundir import RunDir
from craft.wire.activity import read
from craft.wire.codec import encode

from ..victims import Victim, until
from .test_relay import Scripted


def look_at(victim: Victim, run_dir: Path, then: Callable[[WorkerInspector], None] = lambda _: None) -> CloseUp:
    """Have an agent that watches ``victim`` asked about it, and return what it answers."""

    async def main() -> CloseUp:
        lighthouse = Scripted()
        app = web.Application()
        app.router.add_get("/v1/agent", lighthouse.serve)
        async with TestServer(app) as server:
            relay = Relay("a", str(server.make_url("")).rstrip("/"), "token", lambda _: None)
            watchdog = Watchdog(HangLimits())
            victim.watched_by(watchdog)
            looks = WorkerInspector(watchdog, relay, RunDir(run_dir))
            relay.on_look = looks.ask
            relay.take(WorkerReport(member=Member(worker_id=victim.name), pid=1, generation=2))
            following = asyncio.create_task(relay.follow_lighthouse())
            connection = await lighthouse.connection()
            await connection.send_str(encode(Look(number=7, worker_ids=(victim.name,))).decode())
            answered = asyncio.create_task(_answer(lighthouse))
            await _until(lambda: looks._open or answered.done())
            then(looks)
            found = await answered
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            watchdog.remove(victim.name)
            return found

    return asyncio.run(main())


def await_hang(victim: Victim) -> None:
    """Wait until it is in the step in which it hangs."""
    until(lambda: (doing := read(victim.activity)) is not None and doing.step == 41)


async def _answer(lighthouse: Scripted) -> CloseUp:
    said = await lighthouse.next(lambda message: isinstance(message, Looked))
    assert said.number == 7
    (found,) = said.workers
    assert isinstance(found, CloseUp)
    return found


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("kind", "doing"),
    [("gil", "computing microbatch 3 of step 41"), ("deadlock", "in the script's code after the exchange of step 41")],
)
def test_stacks_come_from_a_worker_that_can_say_nothing_itself(tmp_path: Path, kind: str, doing: str) -> None:
    with Victim(tmp_path / "v", kind) as victim:
        await_hang(victim)
        found = look_at(victim, tmp_path)

    assert (found.doing, found.generation, found.host, found.pid) == (doing, 2, "a", victim.pid)
    assert "hang_here" in found.stacks and found.collectives is None
    assert found.since_s is not None and found.since_s >= 0


def test_a_stopped_worker_is_said_to_be_stopped_and_what_it_was_doing(tmp_path: Path) -> None:
    with Victim(tmp_path / "v", "sleep") as victim:
        await_hang(victim)
        victim.stop()
        found = look_at(victim, tmp_path)

    assert found.stopped and "stopped by a signal" in found.state
    assert found.doing == "computing microbatch 3 of step 41"
    assert found.stacks.startswith("no Python stack: the process is stopped by a signal")


def test_what_a_worker_wrote_down_is_in_the_answer(tmp_path: Path) -> None:
    plan = {"step": 0, "branch": 0, "generation": 2, "world_size": 2, "microbatches": [0], "plan": {"0": "w", "1": "v"}}
    commits = [json.dumps({**plan, "step": step, "time": 1000.0 + step / 4}) for step in range(15)]
    with Victim(tmp_path / "v", "sleep") as victim:
        folder = tmp_path / "workers" / victim.name
        folder.mkdir(parents=True)
        (folder / "steps.jsonl").write_text("\n".join(commits) + "\n" + '{"step":15,"bra')
        found = look_at(victim, tmp_path)

    assert [(each.step, each.elapsed_s) for each in found.recent_steps] == [(step, 0.25) for step in range(5, 15)]


def test_a_worker_that_is_to_end_is_kept_until_it_was_looked_at(tmp_path: Path) -> None:
    ended: list[str] = []

    def fence(looks: WorkerInspector) -> None:
        looks.then("somebody else", lambda: ended.append("at once"))
        looks.then(victim.name, lambda: ended.append("afterwards"))
        assert ended == ["at once"]

    with Victim(tmp_path / "v", "sleep") as victim:
        await_hang(victim)
        found = look_at(victim, tmp_path, fence)

    assert "hang_here" in found.stacks
    assert ended == ["at once", "afterwards"]
