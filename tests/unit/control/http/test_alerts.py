"""Alerts, hooks and CloudEvents, sent to a lighthouse in this process over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import BaseTestServer, TestServer

from craft.control.http.alerts import BURST
from craft.control.http.server import make_app
from craft.control.lighthouse import Lighthouse, LighthouseSettings
from craft.decide.job.alerts import AlertRule, AlertSettings, AlertTarget, Hook
from craft.decide.techniques import Alerts, defaults
from craft.protocol.membership import Member
from craft.protocol.messages import HostReport, WorkerReport
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.wire.auth import bearer

TOKEN = "a-token-of-tests-alone-0123456789"
SETTINGS = AlertSettings(
    rules=(
        AlertRule(match={"alertname": "GpuXid"}, answer="fail", target=AlertTarget(host="Hostname", gpu="gpu")),
        AlertRule(match={"alertname": "~Node.*"}, answer="drain", target="node"),
    ),
    hooks={
        "pager": Hook(host="node.name", value="node.state", answers={"down": "fail", "~up|ok": "resolved"}),
        "tickets": Hook(worker="who", id="number", answer="drain"),
    },
)


class Place:
    """A lighthouse with two workers on host a and one on host b, and a client that has its token."""

    def __init__(self, path: Path, lighthouse: Lighthouse, server: BaseTestServer, client: Any) -> None:
        self.path = path
        self.lighthouse = lighthouse
        self.client: aiohttp.ClientSession = client
        self._server = server

    async def post(self, path: str, **more: Any) -> tuple[int, Any]:
        url = str(self._server.make_url("/")).rstrip("/") + path
        async with self.client.post(url, **more) as response:
            return response.status, await response.json()

    async def alert(self, *alerts: dict[str, Any]) -> list[dict[str, Any]]:
        code, answer = await self.post("/v1/alerts", json=group(*alerts))
        assert code == 200, answer
        outcomes: list[dict[str, Any]] = answer["outcomes"]
        assert answer["already"] == all(each["already"] for each in outcomes)
        return outcomes

    def journal(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(RunDir(self.path).journal) if line.get(line["kind"]) == name]

    def standings(self) -> dict[str, str]:
        return {view.member.worker_id: view.standing for view in self.lighthouse.loop.state.workers}


Story = Callable[[Place], Awaitable[None]]
Play = Callable[[Story], None]


def alert(name: str, fingerprint: str = "f1", start: int = 0, status: str = "firing", **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": name, **labels},
        "annotations": {"summary": "smoke"},
        "startsAt": f"2026-01-01T00:00:{start:02}.123456789Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus/graph",
        "fingerprint": fingerprint,
    }


def group(*alerts: dict[str, Any]) -> dict[str, Any]:
    """A body as Alertmanager sends it."""
    return {
        "version": "4", "groupKey": '{}:{alertname="x"}', "truncatedAlerts": 0, "status": "firing", "receiver": "craft",
        "groupLabels": {}, "commonLabels": {}, "commonAnnotations": {}, "externalURL": "http://here", "alerts": alerts,
    }  # fmt: skip


@pytest.fixture
def play(tmp_path: Path) -> Play:
    async def main(story: Story) -> None:
        settings = LighthouseSettings(workers=3, heartbeat_limit_s=60.0, techniques=defaults(Alerts(SETTINGS)))
        lighthouse = Lighthouse(RunDir(tmp_path), settings, "http://here")
        # First all join, then all enter.
        for generation in (0, 1):
            for host, names in (("a", ("w0", "w1")), ("b", ("w2",))):
                workers = tuple(
                    WorkerReport(
                        member=Member(worker_id=name, local_rank=place), pid=1, joined=True, generation=generation
                    )
                    for place, name in enumerate(names)
                )
                lighthouse.loop.handle_report(HostReport(host=host, pid=1, sequence=1, workers=workers))
        async with (
            TestServer(make_app(lighthouse, TOKEN)) as server,
            aiohttp.ClientSession(headers=bearer(TOKEN)) as client,
        ):
            await story(Place(tmp_path, lighthouse, server, client))
            await lighthouse.disconnect()
        lighthouse.journal.close()

    def run(story: Story) -> None:
        coroutine: Coroutine[Any, Any, None] = main(story)
        asyncio.run(coroutine)

    return run


def test_an_alert_about_a_gpu_ends_its_worker_and_the_answer_says_all_that_followed(play: Play) -> None:
    async def story(place: Place) -> None:
        (outcome,) = await place.alert(alert("GpuXid", Hostname="a", gpu="1"))
        assert outcome["event"]["event"] == "AlertFired"
        assert (outcome["event"]["worker_id"], outcome["event"]["answer"]) == ("w1", "fail")
        assert [each["action"] for each in outcome["actions"]] == ["DeclareLost", "Fence", "Reconfigure"]
        assert outcome["actions"][2]["reason"] == "w1 lost (alert GpuXid: smoke): 2 survivors redo its microbatches"
        assert place.standings() == {"w0": "member", "w1": "lost", "w2": "member"}
        assert [line["reason"] for line in place.journal("WorkerLost")] == ["alert GpuXid: smoke"]

    play(story)


def test_the_same_alert_is_carried_out_once_and_one_that_fires_again_later_counts_anew(play: Play) -> None:
    async def story(place: Place) -> None:
        assert [each["already"] for each in await place.alert(alert("Smoke"), alert("Smoke"))] == [False, True]
        (again,) = await place.alert(alert("Smoke"))
        assert (again["already"], again["actions"]) == (True, [])
        (resolved,) = await place.alert(alert("Smoke", status="resolved"))
        assert (resolved["event"]["event"], resolved["actions"], resolved["already"]) == ("AlertResolved", [], False)
        # An old delivery that comes late is still an old one; another start is another alert.
        assert [each["already"] for each in await place.alert(alert("Smoke"), alert("Smoke", start=5))] == [True, False]
        assert len(place.journal("AlertFired")) == 2
        assert len(place.journal("AlertResolved")) == 1

    play(story)


def test_a_restarted_lighthouse_knows_which_alerts_it_has_answered(play: Play) -> None:
    async def first(place: Place) -> None:
        await place.alert(alert("NodeHot", node="b"))

    async def second(place: Place) -> None:
        (outcome,) = await place.alert(alert("NodeHot", node="b"))
        assert outcome["already"]

    play(first)
    play(second)


def test_an_alert_about_a_host_drains_its_workers(play: Play) -> None:
    async def story(place: Place) -> None:
        (outcome,) = await place.alert(alert("NodeHot", node="b"))
        assert [each["action"] for each in outcome["actions"]] == ["Drain", "Propose"]
        assert outcome["actions"][0] == {
            "action": "Drain", "worker_id": "w2", "deadline_s": None, "reason": "alert NodeHot: smoke",
        }  # fmt: skip
        (about_it,) = await place.alert(alert("NodeCold", fingerprint="f2", node="b"))
        assert (about_it["already"], about_it["actions"]) == (False, [])

    play(story)


@pytest.mark.parametrize(
    ("answer", "actions"),
    [
        ("report", []),
        ("abort", ["Reconfigure"]),
        ("stop", ["WindDown"]),
        ("drain", ["Drain", "Propose"]),
        ("fail", ["DeclareLost", "Fence", "Reconfigure"]),
        ("checkpoint", []),
    ],
)
def test_without_a_rule_an_alert_may_say_itself_what_is_to_be_done(play: Play, answer: str, actions: list[str]) -> None:
    async def story(place: Place) -> None:
        (outcome,) = await place.alert(alert("Odd", worker="w2", craft_answer=answer))
        assert [each["action"] for each in outcome["actions"]] == actions
        assert bool(outcome["event"]["note"]) == (answer == "checkpoint")

    play(story)


def test_a_failed_host_is_lost_as_one(play: Play) -> None:
    async def story(place: Place) -> None:
        (outcome,) = await place.alert(alert("Fire", host="a", craft_answer="fail"))
        assert [each["action"] for each in outcome["actions"]] == ["DeclareHostLost", "Reconfigure"]
        assert place.standings() == {"w0": "lost", "w1": "lost", "w2": "member"}

    play(story)


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in alert("X").items() if name != key}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**group(), "version": "3"}, "$.version"),
        ({**group(), "alerts": {}}, "$.alerts"),
        ({"version": "4", "groupKey": "x"}, "$.alerts"),
        (group(alert("X"), {**alert("X"), "status": "odd"}), "$.alerts[1].status"),
        (group(_without("fingerprint")), "$.alerts[0].fingerprint"),
        (group(_without("startsAt")), "$.alerts[0].startsAt"),
        (group({**alert("X"), "startsAt": "yesterday"}), "$.alerts[0].startsAt"),
        (group({**alert("X"), "startsAt": "2026-01-01T00:00:00"}), "$.alerts[0].startsAt"),
        (group({**alert("X"), "labels": {"a": 1}}), "$.alerts[0].labels[...]"),
        (group({**alert("X"), "labels": {"a": "x" * 3000}}), "$.alerts[0].labels[...]"),
        (group(alert("X"), alert("X", craft_answer="reboot")), "$.alerts[1].labels.craft_answer"),
    ],
)
def test_bad_alerts_name_the_field_and_change_nothing_P6(play: Play, body: dict[str, Any], field: str) -> None:
    async def story(place: Place) -> None:
        code, answer = await place.post("/v1/alerts", json=body)
        assert (code, answer["field"]) == (400, field), answer
        assert place.journal("AlertFired") == []

    play(story)


def test_a_flood_of_new_alerts_is_refused_and_old_ones_are_not(play: Play) -> None:
    async def story(place: Place) -> None:
        many = [alert("Smoke", fingerprint=str(number)) for number in range(int(BURST))]
        await place.alert(*many)
        code, answer = await place.post("/v1/alerts", json=group(*(alert("Smoke", str(n), 1) for n in range(500))))
        assert (code, "too many" in answer["error"]) == (429, True)
        assert len(place.journal("AlertFired")) == BURST
        assert all(each["already"] for each in await place.alert(*many))

    play(story)


EVENT = {
    "specversion": "1.0", "id": "e1", "source": "/fans", "type": "fan.loud", "craft_answer": "drain",
    "data": {"worker_id": "w2", "summary": "a loud fan", "rpm": 9000, "more": {"deep": 1}},
}  # fmt: skip
STRUCTURED = {"Content-Type": "application/cloudevents+json; charset=utf-8"}


def test_a_cloud_event_counts_once_in_whichever_mode_it_comes(play: Play) -> None:
    async def story(place: Place) -> None:
        code, answer = await place.post("/v1/cloudevents", json=EVENT, headers=STRUCTURED)
        assert code == 200, answer
        (outcome,) = answer["outcomes"]
        assert [each["action"] for each in outcome["actions"]] == ["Drain", "Propose"]
        assert outcome["actions"][0]["reason"] == "alert fan.loud: a loud fan"
        assert outcome["event"]["labels"]["rpm"] == "9000"
        headers = {f"ce-{name}": str(value) for name, value in EVENT.items() if name != "data"}
        code, answer = await place.post("/v1/cloudevents", json=EVENT["data"], headers=headers)
        assert (code, answer["already"]) == (200, True)
        # The same id of another source is another event; the data may be anything.
        headers = {**headers, "ce-source": "/other%20fans", "Content-Type": "text/plain"}
        code, answer = await place.post("/v1/cloudevents", data=b"\xff", headers=headers)
        assert (code, answer["already"]) == (200, False)
        assert answer["outcomes"][0]["event"]["source"] == "cloudevents /other fans"

    play(story)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"specversion": "0.3"}, "$.specversion"),
        ({"id": ""}, "$.id"),
        ({"source": None}, "$.source"),
        ({"time": "now"}, "$.time"),
        ({"craft_answer": "dance"}, "$.craft_answer"),
        ({"extension": "x" * 3000}, "$"),
        ({"data": {str(n): n for n in range(200)}}, "$.data"),
    ],
)
def test_bad_cloud_events_name_the_field_and_change_nothing_P6(play: Play, change: dict[str, Any], field: str) -> None:
    async def story(place: Place) -> None:
        code, answer = await place.post("/v1/cloudevents", json={**EVENT, **change}, headers=STRUCTURED)
        assert (code, answer["field"]) == (400, field), answer
        code, answer = await place.post("/v1/cloudevents", json=EVENT)
        assert (code, answer["field"]) == (415, "Content-Type")
        assert place.journal("AlertFired") == []

    play(story)


def test_a_hook_holds_until_it_is_resolved_and_then_counts_anew(play: Play) -> None:
    async def story(place: Place) -> None:
        async def say(state: str) -> dict[str, Any]:
            code, answer = await place.post("/v1/hooks/pager", json={"node": {"name": "b", "state": state}})
            assert code == 200, answer
            (outcome,) = answer["outcomes"]
            return dict(outcome)

        down = await say("down")
        assert [each["action"] for each in down["actions"]] == ["DeclareHostLost", "Reconfigure"]
        assert (await say("down"))["already"]
        assert not (await say("worse"))["already"]
        assert (await say("ok"))["event"]["event"] == "AlertResolved"
        assert (await say("up"))["already"]
        again = await say("down")
        assert (again["already"], again["actions"]) == (False, [])

    play(story)


def test_a_hook_with_an_id_counts_each_id_once(play: Play) -> None:
    async def story(place: Place) -> None:
        for number, already in ((7, False), (7, True), (8, False)):
            code, answer = await place.post("/v1/hooks/tickets", json={"who": "w1", "number": number})
            assert (code, answer["already"]) == (200, already)
        assert [line["worker_id"] for line in place.journal("Drain")] == ["w1"]

    play(story)


@pytest.mark.parametrize(
    ("hook", "body", "code", "field"),
    [
        ("nobody", {}, 404, "name"),
        ("pager", {}, 400, "node.name"),
        ("pager", {"node": {"name": "b"}}, 400, "node.state"),
        ("pager", {"node": {"name": ["b"], "state": "down"}}, 400, "node.name"),
        ("pager", [], 400, ""),
        ("tickets", {"who": "w1"}, 400, "number"),
        ("tickets", {"who": "w" * 3000, "number": 1}, 400, "who"),
    ],
)
def test_bad_hooks_name_the_field_and_change_nothing_P6(
    play: Play, hook: str, body: Any, code: int, field: str
) -> None:
    async def story(place: Place) -> None:
        found, answer = await place.post(f"/v1/hooks/{hook}", json=body)
        assert (found, answer["field"]) == (code, field), answer
        assert place.journal("AlertFired") == []

    play(story)


@pytest.mark.parametrize("path", ["/v1/alerts", "/v1/cloudevents", "/v1/hooks/pager"])
def test_without_the_token_nothing_is_taken_P6(play: Play, path: str) -> None:
    async def story(place: Place) -> None:
        code, answer = await place.post(path, json=group(alert("X")), headers={"Authorization": "Bearer wrong"})
        assert (code, "token" in answer["error"]) == (401, True)

    play(story)
