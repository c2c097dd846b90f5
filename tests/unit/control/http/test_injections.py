"""Orders of faults: what is refused, by which field, and what becomes of the others."""

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
from craft.protocol.membership import Member
from craft.protocol.messages import HostReport, WorkerReport
from craft.protocol.values.injections import KEPT
from craft.settings.rundir import RunDir
from craft.wire.auth import bearer, make_token

TOKEN = make_token()
Order = Callable[..., Awaitable[tuple[int, Any]]]
Story = Callable[[Lighthouse, Order], Awaitable[None]]


def play(folder: Path, story: Story, chaos: bool = True) -> None:
    """Run a story against a lighthouse with the members w0 and w1 of host a, and the spare w2."""

    async def main() -> None:
        settings = LighthouseSettings(workers=2, heartbeat_limit_s=60.0, chaos=chaos)
        lighthouse = Lighthouse(RunDir(folder), settings, "http://here")
        for joined in (("w0", "w1"), ("w0", "w1", "w2")):
            workers = tuple(WorkerReport(member=Member(worker_id=name), pid=1, joined=True) for name in joined)
            lighthouse.loop.handle_report(HostReport(host="a", pid=1, sequence=1, workers=workers))
        async with (
            TestServer(make_app(lighthouse, TOKEN)) as server,
            aiohttp.ClientSession(headers=bearer(TOKEN)) as client,
        ):

            async def order(**body: Any) -> tuple[int, Any]:
                url = str(server.make_url("/v1/actions"))
                async with client.post(url, json={"action": "inject", **body}) as response:
                    return response.status, await response.json()

            await story(lighthouse, order)
            await lighthouse.disconnect()
        lighthouse.journal.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "kind", 400),
        ({"kind": "melt"}, "kind", 400),
        ({"kind": 5}, "$.kind", 400),
        ({"kind": "kill"}, "worker_id", 400),
        ({"kind": "kill", "worker_id": "w0", "host": "a"}, "host", 400),
        ({"kind": "kill", "worker_id": "w9"}, "worker_id", 404),
        ({"kind": "hang", "worker_id": "w2"}, "worker_id", 409),
        ({"kind": "kill-agent"}, "host", 400),
        ({"kind": "kill-agent", "worker_id": "w0", "host": "a"}, "worker_id", 400),
        ({"kind": "kill-agent", "host": "z"}, "host", 404),
        ({"kind": "kill-lighthouse", "host": "a"}, "host", 400),
        ({"kind": "kill-lighthouse"}, "sure", 409),
        ({"kind": "slow", "worker_id": "w0", "seconds": -1}, "seconds", 400),
        ({"kind": "slow", "worker_id": "w0", "delay_ms": 1e9}, "delay_ms", 400),
        ({"kind": "kill", "worker_id": "w0", "seconds": 1}, "seconds", 400),
        ({"kind": "drain", "worker_id": "w0", "deadline_s": 1}, "deadline_s", 400),
        ({"kind": "kill", "worker_id": "w0", "when": "soon"}, "$.when", 400),
        ({"action": "stop", "kind": "kill"}, "kind", 400),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused_by_its_field(
    tmp_path: Path, body: dict[str, Any], field: str, code: int
) -> None:
    async def story(lighthouse: Lighthouse, order: Order) -> None:
        got, answer = await order(**body)
        assert (got, answer.get("field")) == (code, field), answer
        assert lighthouse.loop.state.injections == ()

    play(tmp_path, story)


def test_a_job_that_was_not_started_for_it_refuses_unless_one_is_sure(tmp_path: Path) -> None:
    async def story(lighthouse: Lighthouse, order: Order) -> None:
        code, answer = await order(kind="stop", worker_id="w0")
        assert (code, answer["field"]) == (409, "sure")
        code, answer = await order(kind="stop", worker_id="w0", sure=True)
        assert code == 200
        assert lighthouse.status().chaos is False

    play(tmp_path, story, chaos=False)


def test_a_fault_is_journaled_and_stays_in_the_directive_with_the_latest_few(tmp_path: Path) -> None:
    async def story(lighthouse: Lighthouse, order: Order) -> None:
        for _ in range(KEPT + 3):
            code, answer = await order(kind="slow", worker_id="w0", seconds=2, delay_ms=7)
            assert (code, answer["event"]["event"]) == (200, "FaultInjected")
        found = lighthouse.dispatch.directive.injections
        assert len({each.injection_id for each in found}) == KEPT
        assert (found[-1].fault, found[-1].worker_id, found[-1].seconds, found[-1].delay_ms) == ("slow", "w0", 2, 7)
        journal = RunDir(tmp_path).journal.read_text()
        assert journal.count('"event":"FaultInjected"') == KEPT + 3
        assert lighthouse.status().chaos is True

    play(tmp_path, story)


def test_a_drain_is_the_ordinary_one_and_nobody_else_is_told(tmp_path: Path) -> None:
    async def story(lighthouse: Lighthouse, order: Order) -> None:
        code, answer = await order(kind="drain", worker_id="w0")
        assert code == 200
        assert [action["action"] for action in answer["actions"]] == ["Drain"]
        assert lighthouse.loop.state.injections == ()

    play(tmp_path, story)
