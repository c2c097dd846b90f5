"""The HTTP surface of a lighthouse in this process, over real sockets."""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import BaseTestServer, TestServer

from craft.control.http.server import make_app
from craft.control.lighthouse import Lighthouse, LighthouseSettings
from craft.decide.techniques import defaults
from craft.decide.techniques.technique import Chosen
from craft.protocol.events import CheckpointFailed, CheckpointWritten
from craft.protocol.membership import Member
from craft.protocol.messages import HostReport, WorkerReport
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.wire.auth import bearer
from craft.wire.codec import MAX_MESSAGE_BYTES

TOKEN = "a-token-of-tests-alone-0123456789"


def without(*names: str) -> Chosen:
    """All that are usually on, but those."""
    return Chosen([each for name, each in defaults().by_name.items() if name not in names])


class Place:
    """A lighthouse with two workers, and a client that has its token."""

    def __init__(self, lighthouse: Lighthouse, server: BaseTestServer, client: aiohttp.ClientSession) -> None:
        self.lighthouse = lighthouse
        self.client = client
        self._server = server

    def url(self, path: str) -> str:
        return str(self._server.make_url("/")).rstrip("/") + path

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.client.request(method, self.url(path), **more) as response:
            return response.status, await response.json()


Story = Callable[[Place], Awaitable[None]]
Play = Callable[[Story], None]


@pytest.fixture
def settings() -> LighthouseSettings:
    return LighthouseSettings(workers=2, heartbeat_limit_s=60.0)


@pytest.fixture
def play(tmp_path: Path, settings: LighthouseSettings) -> Play:
    """Run a story against a lighthouse whose two workers have joined."""

    async def main(story: Story) -> None:
        lighthouse = Lighthouse(RunDir(tmp_path), settings, "http://here")
        workers = tuple(
            WorkerReport(member=Member(worker_id=name), pid=1, joined=True, step=3, metrics={"loss": 0.5})
            for name in ("w0", "w1")
        )
        lighthouse.loop.handle_report(HostReport(host="a", pid=1, sequence=1, workers=workers))
        async with (
            TestServer(make_app(lighthouse, TOKEN)) as server,
            aiohttp.ClientSession(headers=bearer(TOKEN)) as client,
        ):
            await story(Place(lighthouse, server, client))
            await lighthouse.disconnect()
        lighthouse.journal.close()

    def run(story: Story) -> None:
        coroutine: Coroutine[Any, Any, None] = main(story)
        asyncio.run(coroutine)

    return run


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xff"])
@pytest.mark.parametrize("path", ["/v1/status", "/v1/events", "/metrics", "/v1/failures", "/v1/agent", "/nowhere"])
def test_without_the_token_everything_but_healthz_is_refused_P6(play: Play, path: str, header: str | None) -> None:
    async def story(place: Place) -> None:
        headers = {} if header is None else {"Authorization": header}
        async with (
            aiohttp.ClientSession(headers=headers) as stranger,
            stranger.get(place.url(path)) as response,
            stranger.get(place.url("/healthz")) as health,
        ):
            assert response.status == 401
            assert "token" in (await response.json())["error"]
            assert health.status == 200

    play(story)


def test_status_has_the_documented_shape(play: Play) -> None:
    async def story(place: Place) -> None:
        code, status = await place.ask("GET", "/v1/status")
        assert code == 200
        assert (status["step"], status["generation"], status["state"], status["faults"]) == (3, 1, "running", 0)
        assert status["workers"][0] == {
            "worker_id": "w0",
            "pid": 1,
            "host": "a",
            "rank": 0,
            "state": "member",
            "step": 3,
            "microbatch_s": None,
        }
        assert set(status["lighthouse"]) == {"pid", "url"}
        assert {"fault_list", "metrics", "slots", "total_steps", "step_s", "reason"} <= set(status)

    play(story)


def test_a_reported_failure_is_carried_out_once(play: Play) -> None:
    async def story(place: Place) -> None:
        body = {"worker_id": "w1", "reason": "smoke"}
        code, answer = await place.ask("POST", "/v1/failures", json=body)
        assert (code, answer["already"]) == (200, False)
        assert answer["event"]["event"] == "WorkerLost"
        assert [action["action"] for action in answer["actions"]] == ["Fence", "Reconfigure"]
        code, answer = await place.ask("POST", "/v1/failures", json=body)
        assert (code, answer["already"], answer["actions"]) == (200, True, [])
        assert place.lighthouse.loop.state.members == ("w0",)
        assert len(place.lighthouse.loop.faults) == 1

    play(story)


def test_a_reported_host_takes_all_its_workers(play: Play) -> None:
    async def story(place: Place) -> None:
        code, answer = await place.ask("POST", "/v1/failures", json={"host": "a"})
        assert (code, answer["event"]["event"]) == (200, "HostLost")
        assert place.lighthouse.status().state == "failed"

    play(story)


BAD_REQUESTS = [
    ("POST", "/v1/failures", b"", 400, ""),
    ("POST", "/v1/failures", b"{", 400, ""),
    ("POST", "/v1/failures", b"[]", 400, ""),
    ("POST", "/v1/failures", b"{}", 400, "worker_id"),
    ("POST", "/v1/failures", b'{"worker_id": 3}', 400, "worker_id"),
    ("POST", "/v1/failures", b'{"worker": "w0"}', 400, "worker"),
    ("POST", "/v1/failures", b'{"worker_id": "w0", "host": "a"}', 400, "worker_id"),
    ("POST", "/v1/failures", b'{"worker_id": "w0", "reason": "' + b"x" * 3000 + b'"}', 400, "reason"),
    ("POST", "/v1/failures", b'{"worker_id": "nobody"}', 404, "worker_id"),
    ("POST", "/v1/failures", b'{"host": "nowhere"}', 404, "host"),
    ("POST", "/v1/failures", b" " * (MAX_MESSAGE_BYTES + 1), 413, None),
    ("POST", "/v1/actions", b'{"action": "dance"}', 400, "action"),
    ("POST", "/v1/actions", b'{"action": "abort", "worker_id": "w0"}', 400, "worker_id"),
    ("POST", "/v1/actions", b'{"reason": "x"}', 400, "action"),
    ("POST", "/v1/actions", b'{"action": "stop", "deadline_s": 3}', 400, "deadline_s"),
    ("POST", "/v1/actions", b'{"action": "preempt", "deadline_s": -1}', 400, "deadline_s"),
    ("POST", "/v1/actions", b'{"action": "preempt", "worker_id": "w0"}', 400, "worker_id"),
    ("POST", "/v1/actions", b'{"action": "preempt", "tag": "best"}', 400, "tag"),
    ("POST", "/v1/actions", b'{"action": "preempt"}', 409, "action"),
    ("POST", "/v1/actions", b'{"action": "checkpoint", "tag": ""}', 400, "tag"),
    ("POST", "/v1/actions", b'{"action": "checkpoint", "tag": "a\\nb"}', 400, "tag"),
    ("POST", "/v1/actions", b'{"action": "checkpoint"}', 409, "action"),
    ("GET", "/v1/events?follow=perhaps", None, 400, "follow"),
    ("GET", "/v1/agent", None, 400, None),
    ("GET", "/v1/nothing", None, 404, None),
    ("DELETE", "/v1/status", None, 405, None),
    ("GET", "/v1/failures", None, 405, None),
]


@pytest.mark.parametrize(("method", "path", "body", "code", "field"), BAD_REQUESTS)
def test_bad_input_is_refused_by_name_and_changes_nothing(
    play: Play, method: str, path: str, body: bytes | None, code: int, field: str | None
) -> None:
    async def story(place: Place) -> None:
        before = place.lighthouse.loop.state
        found, answer = await place.ask(method, path, data=None if body is None else io.BytesIO(body))
        assert found == code
        assert answer["error"]
        if field is not None:
            assert field in answer["field"]
        assert place.lighthouse.loop.state == before

    play(story)


def test_an_abort_has_the_same_members_meet_again(play: Play) -> None:
    async def story(place: Place) -> None:
        before = place.lighthouse.loop.state.generation
        code, answer = await place.ask("POST", "/v1/actions", json={"action": "abort", "reason": "all wait"})
        assert (code, [action["action"] for action in answer["actions"]]) == (200, ["Reconfigure"])
        after = place.lighthouse.loop.state.generation
        assert before is not None and after is not None
        assert (after.number, after.worker_ids) == (before.number + 1, before.worker_ids)

    play(story)


def test_stop_is_carried_out_once(play: Play) -> None:
    async def story(place: Place) -> None:
        code, answer = await place.ask("POST", "/v1/actions", json={"action": "stop", "reason": "enough"})
        assert (code, answer["already"], answer["actions"][0]["action"]) == (200, False, "WindDown")
        code, answer = await place.ask("POST", "/v1/actions", json={"action": "stop", "reason": "again"})
        assert (code, answer["already"]) == (200, True)
        assert place.lighthouse.status().reason == "enough"

    play(story)


def takes_checkpoints(place: Place, *notes: CheckpointWritten | CheckpointFailed) -> None:
    """Have w0 say so."""
    first = WorkerReport(
        member=Member(worker_id="w0", host="a"), pid=1, joined=True, generation=1, checkpoints=True, notes=notes
    )
    second = WorkerReport(member=Member(worker_id="w1", host="a"), pid=1, joined=True, generation=1)
    place.lighthouse.loop.handle_report(HostReport(host="a", pid=1, sequence=2, workers=(first, second)))


WRITTEN = CheckpointWritten(name="c", branch=0, step=7, url="store", total_bytes=100, new_bytes=40, seconds=0.5)


def test_preempt_is_carried_out_once_and_stop_then_changes_nothing(play: Play) -> None:
    async def story(place: Place) -> None:
        takes_checkpoints(place)
        order = {"action": "preempt", "reason": "a spot instance", "deadline_s": 60}
        before = time.time()
        code, answer = await place.ask("POST", "/v1/actions", json=order)
        assert (code, answer["already"], answer["actions"][0]["action"]) == (200, False, "Preempt")
        assert before + 60 <= answer["actions"][0]["deadline"] <= time.time() + 60
        code, answer = await place.ask("POST", "/v1/actions", json=order)
        assert (code, answer["already"]) == (200, True)
        code, answer = await place.ask("POST", "/v1/actions", json={"action": "stop"})
        assert (code, answer["already"]) == (200, True)
        code, answer = await place.ask("POST", "/v1/actions", json={"action": "checkpoint"})
        assert (code, answer["field"]) == (409, "action")
        status = place.lighthouse.status()
        assert (status.state, status.reason) == ("stopping", "makes room: a spot instance")

    play(story)


def test_a_drain_is_news_again_only_with_less_time(play: Play) -> None:
    async def story(place: Place) -> None:
        takes_checkpoints(place)
        for deadline_s, already in ((None, False), (None, True), (60, False), (60, True), (5, False), (60, True)):
            order = {"action": "drain", "worker_id": "w1", "deadline_s": deadline_s}
            code, answer = await place.ask("POST", "/v1/actions", json=order)
            assert (code, answer["already"]) == (200, already), deadline_s

    play(story)


@pytest.mark.parametrize("order", [{"worker_id": "b-w0"}, {"host": "b"}])
def test_a_drain_of_those_who_are_starting_is_refused_with_the_reason(play: Play, order: dict[str, str]) -> None:
    async def story(place: Place) -> None:
        starting = WorkerReport(member=Member(worker_id="b-w0", host="b"), pid=1)
        place.lighthouse.loop.handle_report(HostReport(host="b", pid=1, sequence=2, workers=(starting,)))
        code, answer = await place.ask("POST", "/v1/actions", json={"action": "drain", **order})
        assert (code, answer["field"]) == (409, *order)
        assert "is starting" in answer["error"]

    play(story)


@pytest.mark.parametrize("settings", [LighthouseSettings(workers=2, techniques=without("preemption"))])
def test_an_order_that_no_technique_answers_is_refused(play: Play) -> None:
    async def story(place: Place) -> None:
        takes_checkpoints(place)
        code, answer = await place.ask("POST", "/v1/actions", json={"action": "preempt"})
        assert (code, answer["field"]) == (409, "action") and "no technique that is on" in answer["error"]
        labels = {"alertname": "Rack", "craft_answer": "preempt"}
        alert = {"status": "firing", "labels": labels, "startsAt": "2026-11-15T11:00:00Z", "fingerprint": "f"}
        group = {"version": "4", "groupKey": "g", "alerts": [alert]}
        code, answer = await place.ask("POST", "/v1/alerts", json=group)
        assert (code, answer["outcomes"][0]["event"]["answer"]) == (200, "report")
        assert not place.lighthouse.loop.state.preempting
        code, _ = await place.ask("POST", "/v1/actions", json={"action": "checkpoint"})
        assert code == 200

    play(story)


def test_checkpoints_are_asked_for_again_and_again(play: Play) -> None:
    async def story(place: Place) -> None:
        takes_checkpoints(place)
        for tag in ("best", None):
            code, answer = await place.ask("POST", "/v1/actions", json={"action": "checkpoint", "tag": tag})
            assert (code, answer["already"], answer["actions"][0]["tag"]) == (200, False, tag)
        wishes = place.lighthouse.dispatch.directive.wishes
        assert [(wish.number, wish.tag) for wish in wishes] == [(1, "best"), (2, None)]

    play(story)


def test_checkpoints_are_in_the_status_and_in_the_metrics(play: Play) -> None:
    async def story(place: Place) -> None:
        failed = CheckpointFailed(worker_id="w0", name="d", step=9, error="disk full", tries=1, retry_s=1.0)
        takes_checkpoints(place, WRITTEN, failed)
        _, status = await place.ask("GET", "/v1/status")
        found = status["checkpoints"]
        assert (found["taken"], found["last"]["step"], found["written"], found["failures"]) == (True, 7, 1, 1)
        async with place.client.get(place.url("/metrics")) as response:
            text = await response.text()
        for line in (
            "craft_checkpoints_total 1.0",
            "craft_checkpoint_last_step 7.0",
            "craft_checkpoint_last_time_seconds 1.",
            "craft_checkpoint_bytes_total 100.0",
            "craft_checkpoint_new_bytes_total 40.0",
            "craft_checkpoint_failures_total 1.0",
        ):
            assert line in text

    play(story)


def test_a_restarted_lighthouse_journals_no_note_twice(play: Play, tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        takes_checkpoints(place, WRITTEN)
        again = Lighthouse(RunDir(tmp_path), place.lighthouse.settings, "http://here")
        takes_checkpoints(Place(again, place._server, place.client), WRITTEN)
        again.journal.close()
        assert again.loop.state.checkpoint == WRITTEN
        assert again.status().checkpoints.written == 1
        names = [line.get("event") for line in read_lines(RunDir(tmp_path).journal)]
        assert names.count("CheckpointWritten") == 1

    play(story)


def test_metrics_are_in_prometheus_format(play: Play) -> None:
    async def story(place: Place) -> None:
        async with place.client.get(place.url("/metrics")) as response:
            text = await response.text()
            assert response.headers["Content-Type"].startswith("text/plain")
        assert "craft_generation 1.0" in text
        assert 'craft_workers{state="member"} 2.0' in text
        assert 'craft_metric{name="loss"} 0.5' in text
        assert "craft_faults_total 0.0" in text

    play(story)


def test_random_requests_never_make_the_lighthouse_fail_P6(play: Play) -> None:
    chance = random.Random(0)
    paths = [
        "/",
        "/healthz",
        "/v1/status",
        "/v1/events?follow=0",
        "/metrics",
        "/v1/failures",
        "/v1/actions",
        "/v1/agent",
    ]
    pieces = [
        '{"worker_id":',
        '"w0"',
        '{"host":',
        "null",
        "}",
        "[",
        '"\\ud800"',
        "1e999",
        '"action":"stop"',
        ",",
        "\x00",
        "é",
    ]

    def body() -> bytes:
        if chance.random() < 0.5:
            return chance.randbytes(chance.randrange(60))
        return "".join(chance.choice(pieces) for _ in range(chance.randrange(8))).encode()

    async def story(place: Place) -> None:
        for _ in range(300):
            path = chance.choice(paths) + (f"/%{chance.randrange(256):02x}" if chance.random() < 0.2 else "")
            headers = {"Last-Event-ID": chance.choice(["1", "-1", "x", "9" * 40])} if chance.random() < 0.3 else {}
            method = chance.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
            async with place.client.request(method, place.url(path), data=body(), headers=headers) as response:
                await response.read()
                assert response.status < 500, (method, path)
        code, _ = await place.ask("GET", "/v1/status")
        assert code == 200

    play(story)
