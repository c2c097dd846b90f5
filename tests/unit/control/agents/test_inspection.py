"""The lighthouse asks agents about workers, over real sockets: for whoever wants to know, and when somebody hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from craft.control.http.server import make_app
from craft.control.lighthouse import Lighthouse, LighthouseSettings
from craft.protocol.events import WorkerOverdue
from craft.protocol.membership import Member
from craft.protocol.messages import Directive, Exited, HostReport, WorkerReport
from craft.protocol.values.inspection import CloseUp, Look, Looked
from craft.settings.rundir import RunDir
from craft.wire.auth import bearer
from craft.wire.codec import encode, pack, unpack

TOKEN = "a-token-of-tests-alone-0123456789"
NAMES = ("w0", "w1")


def close_up(worker_id: str, phase: str) -> CloseUp:
    return CloseUp(
        worker_id=worker_id, host="a", pid=7, time=1.0, state="asleep", stopped=False, phase=phase, doing=phase, since_s=1.0,
        step=3, microbatch=None, gil_kept_s=None, generation=1, rank=0, members=NAMES, stacks="x" * 20_000,
    )  # fmt: skip


class Scene:
    """A lighthouse, its one agent, and somebody who asks."""

    def __init__(self, lighthouse: Lighthouse, url: str, client: aiohttp.ClientSession) -> None:
        self.lighthouse = lighthouse
        self._url = url
        self._client = client
        self._sequence = 0
        self.heard: list[Look | Directive] = []
        """What the agent was sent, in order."""
        self.phases = {"w0": "exchanging", "w1": "computing"}
        self.answers = True
        self._agent: aiohttp.ClientWebSocketResponse[bool] | None = None

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self._client.get(self._url + path) as response:
            return response.status, await response.json()

    async def connect(self) -> None:
        """The agent of host a comes, with two workers that act under generation 1."""
        self._agent = await self._client.ws_connect(f"{self._url}/v1/agent")
        await self.report()
        await self.report(generation=1)
        self._task = asyncio.create_task(self._serve())

    async def report(
        self, *, generation: int = 0, exited: tuple[str, ...] = (), overdue: WorkerOverdue | None = None
    ) -> None:
        assert self._agent is not None
        self._sequence += 1
        workers = tuple(
            WorkerReport(
                member=Member(worker_id=name, host="a"), pid=1, joined=True, generation=generation, step=3,
                phase=self.phases[name], overdue=overdue if name == "w1" else None,
            )
            for name in NAMES
        )  # fmt: skip
        ended = tuple(Exited(worker_id=name, exit_code=1, signal=None, time=1.0) for name in exited)
        report = HostReport(host="a", pid=1, sequence=self._sequence, workers=workers, exited=ended)
        await self._agent.send_str(encode(report).decode())

    async def _serve(self) -> None:
        assert self._agent is not None
        async for message in self._agent:
            said = unpack(message.data)
            if isinstance(said, Look | Directive):
                self.heard.append(said)
            if isinstance(said, Look) and self.answers:
                chosen = said.worker_ids or NAMES
                found = Looked(number=said.number, workers=tuple(close_up(name, self.phases[name]) for name in chosen))
                data = pack(found)
                await (self._agent.send_str(data) if isinstance(data, str) else self._agent.send_bytes(data))

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = asyncio.get_running_loop().time() + 10.0
        while not condition():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)

    def standing(self, worker_id: str) -> str | None:
        view = self.lighthouse.loop.state.view(worker_id)
        return None if view is None else view.standing


Play = Callable[[Callable[[Scene], Awaitable[None]]], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    async def main(story: Callable[[Scene], Awaitable[None]]) -> None:
        lighthouse = Lighthouse(RunDir(tmp_path), LighthouseSettings(workers=2, heartbeat_limit_s=60.0), "http://here")
        async with (
            TestServer(make_app(lighthouse, TOKEN)) as server,
            aiohttp.ClientSession(headers=bearer(TOKEN)) as client,
        ):
            await story(Scene(lighthouse, str(server.make_url("/")).rstrip("/"), client))
            await lighthouse.disconnect()
        lighthouse.journal.close()

    return lambda story: asyncio.run(main(story))


def test_a_worker_is_shown_with_those_it_waits_for(play: Play) -> None:
    async def story(scene: Scene) -> None:
        await scene.connect()
        await scene.until(lambda: scene.standing("w1") == "member")

        code, found = await scene.get("/v1/workers/w0/debug")

        assert (code, found["worker_id"], found["waits_for"]) == (200, "w0", ["w1"])
        assert found["stacks"] == "x" * 20_000
        assert (await scene.get("/v1/workers/w1/debug"))[1]["waits_for"] == []

    play(story)


def test_who_cannot_be_looked_at_gets_a_sentence_that_says_why(play: Play) -> None:
    async def story(scene: Scene) -> None:
        assert await scene.get("/v1/workers/w9/debug") == (
            404,
            {"error": "there is no worker 'w9'", "field": "worker_id"},
        )
        await scene.connect()
        await scene.until(lambda: scene.standing("w1") == "member")
        scene.answers, scene.lighthouse.sessions.inspections.limit_s = False, 0.05
        code, found = await scene.get("/v1/workers/w0/debug")
        assert code == 424 and "did not answer within 0.05 s" in found["error"]
        await scene.report(generation=1, exited=("w1",))
        await scene.until(lambda: scene.standing("w1") == "lost")
        code, found = await scene.get("/v1/workers/w1/debug")
        assert code == 409 and "does not run any more" in found["error"]
        assert scene._agent is not None
        await scene._agent.close()
        await scene.until(lambda: scene.lighthouse.sessions.by_host["a"].closed)
        code, found = await scene.get("/v1/workers/w0/debug")
        assert code == 424 and "is not connected" in found["error"]

    play(story)


def test_when_somebody_hangs_all_are_looked_at_before_anybody_is_told_to_go_on(play: Play, tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.connect()
        await scene.until(lambda: scene.standing("w1") == "member")
        found = WorkerOverdue(
            worker_id="w1",
            phase="computing",
            step=3,
            elapsed_s=10.1,
            limit_s=10.0,
            detail="computing step 3 for 10.1 s",
        )
        await scene.report(generation=1, overdue=found)
        await scene.until(lambda: list(tmp_path.glob("diagnosis/*/summary.txt")))

        assert scene.standing("w1") == "lost"
        said_to = [type(each) if isinstance(each, Look) else each.fenced for each in scene.heard]
        assert said_to[-2:] == [Look, ("w1",)], "looked at first"
        (summary,) = tmp_path.glob("diagnosis/*-w1-computing/summary.txt")
        said = summary.read_text()
        assert said.startswith("w1 hangs: computing step 3 for 10.1 s; w0 waits for it")
        assert "w0 waits in the exchange for w1." in said
        assert (summary.parent / "w0.txt").exists()

    play(story)
