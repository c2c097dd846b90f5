"""A real lighthouse process, with real WebSocket clients for agents: killed, silenced and confused for real."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import pytest

from craft.protocol.messages import Directive
from craft.telemetry.records.journal import read_lines
from craft.wire.auth import read_token

from .scene import Cast, Scene, at, beats, follow_until, killed, members, play, worker


def test_a_lost_worker_leads_to_a_new_generation_for_all_hosts_at_once(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30")

    async def story(cast: Cast) -> None:
        first, second = await cast.agent("a", 1), await cast.agent("b", 2)
        await first.report(worker("w0"))
        await second.report(worker("w1"))
        for agent in (first, second):
            assert members(await agent.directive(at(1))) == ("w0", "w1")
        await first.report(worker("w0", 1, step=3))
        began = time.perf_counter()
        await second.report(worker("w1", 1), exited=(killed("w1"),))
        directive = await first.directive(at(2))
        # Measured: milliseconds. By silence alone it would have been 30 s.
        assert time.perf_counter() - began < 10.0
        # Its agent saw it end: nobody has to be told to end it.
        assert (members(directive), directive.fenced) == (("w0",), ())
        assert await second.directive(at(2)) == directive

    play(scene, story)
    status = scene.client.get_status()
    assert (status["generation"], status["faults"], status["step"]) == (2, 1, 3)
    assert status["fault_list"][0]["reason"] == "killed by SIGKILL"


def test_reports_that_are_repeated_late_or_reordered_do_no_harm(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30")

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0"), worker("w1"))
        await agent.directive(at(1))
        gone = (killed("w1"),)
        await agent.report(worker("w0", 1), worker("w1", 1), exited=gone, sequence=9)
        await agent.report(worker("w0", 1), worker("w1", 1), exited=gone, sequence=9)
        await agent.report(worker("w0", 0), worker("w1", 0), sequence=2)
        await agent.directive(at(2))
        # A connection that comes back says everything again.
        again = await cast.agent()
        await again.report(worker("w0", 2), exited=gone)
        assert members(await again.directive()) == ("w0",)
        assert (await agent.closed())[0] == 1000

    play(scene, story)
    names = [line["event"] for line in scene.client.events() if line["kind"] == "event"]
    assert names.count("WorkerLost") == 1
    assert names.count("WorkerJoined") == 2


@pytest.mark.parametrize("way", ["silent", "closed"])
def test_a_host_that_is_not_heard_is_lost_after_the_limit_P5(scene: Scene, way: str) -> None:
    scene.light("--heartbeat-limit", "0.3")

    async def story(cast: Cast) -> None:
        living, dying = await cast.agent("a", 1), await cast.agent("b", 2)
        await dying.report(worker("w1"))
        if way == "closed":
            await dying.socket.close()
        beat = asyncio.create_task(beats(living, worker("w0")))
        directive = await living.directive(at(2))
        beat.cancel()
        assert (members(directive), directive.fenced) == (("w0",), ("w1",))

    play(scene, story)
    lost = [line for line in read_lines(scene.run.journal) if line.get("event") == "HostLost"]
    assert [line["host"] for line in lost][:1] == ["b"]
    assert ("closed" in lost[0]["reason"]) == (way == "closed")


BAD_MESSAGES = [
    ("{", ""),
    ("[1]", ""),
    ('{"type":"HostReport","host":"b","pid":"x","sequence":1}', "$.pid"),
    ('{"type":"Directive","sequence":1}', "$.type"),
    ('{"type":"HostReport","host":"","pid":2,"sequence":1}', "$.host"),
    ('{"type":"HostReport","host":"a","pid":2,"sequence":1}', "has an agent already"),
]


def test_a_bad_message_ends_its_own_connection_and_nothing_else_P6(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30", workers=1)

    async def story(cast: Cast) -> None:
        good = await cast.agent("a", 1)
        await good.report(worker("w0"))
        directive = await good.directive(at(1))
        for text, named in BAD_MESSAGES:
            bad = await cast.agent("b", 2)
            await bad.socket.send_str(text)
            code, reason = await bad.closed()
            assert code == 1008
            assert named in reason
        large = await cast.agent("b", 2)
        with contextlib.suppress(ConnectionError):
            await large.socket.send_str(" " * (5 * 1024 * 1024))
        assert (await large.closed())[0] in (1009, 1006)
        await good.report(worker("w0", 1, step=3), exited=(killed("w0"),))
        assert (await good.directive(lambda told: told.sequence > directive.sequence)).stopping

    play(scene, story)


def test_a_killed_lighthouse_comes_back_with_growing_generations_P3(scene: Scene) -> None:
    first = scene.light("--heartbeat-limit", "30")
    address, token = scene.run.read_address(), read_token(scene.run.token)
    told: list[Directive] = []

    async def before(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0"), worker("w1"))
        await agent.directive(at(1))
        await agent.report(worker("w0", 1), worker("w1", 1), exited=(killed("w1"),))
        told.append(await agent.directive(at(2)))

    async def after(cast: Cast) -> None:
        agent = await cast.agent()
        adopted = await agent.directive()
        assert adopted.generation == told[0].generation
        assert adopted.sequence > told[0].sequence
        await agent.report(worker("w0", 2), worker("w2"), exited=(killed("w1"),))
        proposed = await agent.directive(lambda directive: directive.upcoming is not None)
        assert proposed.upcoming is not None
        assert proposed.upcoming.number == 3

    play(scene, before)
    first.send_signal(signal.SIGKILL)
    first.wait()
    scene.light("--heartbeat-limit", "30")
    assert (scene.run.read_address(), read_token(scene.run.token)) == (address, token)
    play(scene, after)
    assert scene.client.get_status()["faults"] == 1


def test_a_host_that_does_not_come_back_to_a_restarted_lighthouse_is_lost_once_another_one_is_back(
    scene: Scene,
) -> None:
    first = scene.light("--heartbeat-limit", "30")

    async def before(cast: Cast) -> None:
        for agent, name in ((await cast.agent("a", 1), "w0"), (await cast.agent("b", 2), "w1")):
            await agent.report(worker(name))
        await agent.directive(at(1))

    async def after(cast: Cast) -> None:
        back = await cast.agent("b", 2)
        beat = asyncio.create_task(beats(back, worker("w1", 1)))
        assert members(await back.directive(at(2))) == ("w1",)
        beat.cancel()

    play(scene, before)
    first.kill()
    first.wait()
    scene.light("--heartbeat-limit", "0.2")
    play(scene, after)
    assert [line["host"] for line in scene.client.events() if line.get("event") == "HostLost"] == ["a"]


def test_a_lighthouse_that_hears_nobody_declares_nobody_lost(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "0.2")

    async def story(cast: Cast) -> None:
        first, second = await cast.agent("a", 1), await cast.agent("b", 2)
        await first.report(worker("w0"))
        await second.report(worker("w1"))
        await first.directive(at(1))
        await asyncio.to_thread(follow_until, scene, "LighthouseAlone")
        await second.report(worker("w1", 1))
        await asyncio.to_thread(follow_until, scene, "LighthouseHeard")
        await first.report(worker("w0", 1))
        status = await asyncio.to_thread(scene.client.get_status)
        assert (status["generation"], status["faults"]) == (1, 0)

    play(scene, story)
