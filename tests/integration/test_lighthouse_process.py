"""The lighthouse as a process: its run directory, its port, its end, and the commands that talk to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.users import STRANGER, needs_root

from craft.cli import inspect
from craft.protocol.errors import ConfigError, Unauthorized, Unreachable
from craft.wire.client import Client

from .scene import COMMAND, LIMIT_S, Cast, Scene, at, play, worker


def test_a_lighthouse_that_cannot_make_a_generation_durable_tells_nobody_and_ends_P3(scene: Scene) -> None:
    process = scene.light("--heartbeat-limit", "30", workers=1)

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        scene.run.path.rename(scene.run.path.with_name("moved"))
        await agent.report(worker("w0"))
        assert (await agent.closed())[0] in (1001, 1006, 1011)

    play(scene, story)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "cannot make a generation durable" in err


@needs_root
def test_a_run_directory_of_another_user_is_refused_with_its_token_and_its_links(scene: Scene, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    scene.run.path.mkdir()
    scene.run.token.write_text("known-to-a-stranger")
    for file in (scene.run.journal, scene.run.lock, scene.run.generation):
        file.symlink_to(victim)
    for path in (scene.run.path, *scene.run.path.iterdir()):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    assert f"belongs to user {STRANGER}" in scene.refused()
    assert victim.read_text() == "precious"
    assert not scene.run.address.exists()


def test_a_second_lighthouse_on_the_same_run_directory_is_refused(scene: Scene) -> None:
    first = scene.light()
    message = scene.refused()
    assert f"pid {first.pid}" in message
    assert scene.client.get_status()["lighthouse"]["pid"] == first.pid


def test_a_port_in_use_is_named(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in scene.refused("--port", str(port))


def test_the_run_directory_is_private_and_sigterm_ends_cleanly(scene: Scene) -> None:
    process = scene.light()
    assert scene.run.path.stat().st_mode & 0o777 == 0o700
    assert scene.run.token.stat().st_mode & 0o777 == 0o600
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_events_are_streamed_as_they_happen(scene: Scene) -> None:
    process = scene.light("--heartbeat-limit", "30", workers=1)
    stream = scene.client.events(follow=True)
    assert next(stream)["event"] == "LighthouseStarted"

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0"))
        await agent.directive(at(1))

    play(scene, story)
    assert [next(stream)[name] for name in ("event", "action")] == ["WorkerJoined", "Reconfigure"]
    assert len(list(scene.client.events())) == 3
    process.send_signal(signal.SIGTERM)
    assert list(stream) == []
    assert process.wait(LIMIT_S) == 0


def test_the_client_says_what_is_wrong(scene: Scene) -> None:
    process = scene.light()
    with pytest.raises(Unauthorized, match="--dir"):
        Client(scene.run.read_address(), "wrong" * 5).get_status()
    with pytest.raises(ConfigError, match="no worker 'w7'"):
        scene.client.report_failure(worker_id="w7")
    assert scene.client.stop("enough")["already"] is False
    assert scene.client.get_status()["reason"] == "enough"
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)
    with pytest.raises(Unreachable, match="no lighthouse answers"):
        scene.client.get_status()


def test_a_lighthouse_ends_with_its_parent(scene: Scene) -> None:
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {COMMAND!r}, *sys.argv[1:]]).wait()"
    command = [sys.executable, "-c", nested, "--workers", "1", "--dir", str(scene.run.path), "--with-parent"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    scene.processes.append(parent)
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith("lighthouse listening")
    parent.kill()
    # Its end of the pipe closes when it ends, and not before.
    assert parent.stdout.read() == ""
    with pytest.raises(Unreachable):
        scene.client.get_status()


def craft(command: click.Command, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, list(arguments))
    return result.exit_code, result.output


def test_the_command_line_shows_a_job_and_acts_on_it(scene: Scene) -> None:
    scene.light("--heartbeat-limit", "30")

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0", metrics={"loss": 0.25}), worker("w1"))
        await agent.directive(at(1))

    play(scene, story)
    run = ("--dir", str(scene.run.path))
    code, text = craft(inspect.status, *run)
    assert (code, "running: step 0, generation 1" in text, "loss 0.25" in text) == (0, True, True)
    code, text = craft(inspect.status, *run, "--json")
    assert (code, json.loads(text)["generation"]) == (0, 1)
    code, text = craft(inspect.fail, "w1", *run, "--reason", "smoke")
    assert (code, text.startswith("worker w1 is out")) == (0, True)
    assert craft(inspect.fail, "w1", *run) == (0, "worker w1 was gone already\n")
    assert craft(inspect.fail, "w8", *run) == (2, "craft: there is no worker 'w8'\n")
    code, text = craft(inspect.events, *run)
    assert (code, "WorkerLost" in text, "smoke" in text) == (0, True, True)
    assert craft(inspect.stop, *run) == (0, "the job ends after the step in flight\n")


def test_the_command_line_explains_that_nothing_is_running(scene: Scene, tmp_path: Path) -> None:
    code, text = craft(inspect.status, "--dir", str(tmp_path / "nothing"))
    assert (code, "craft run" in text) == (2, True)
    scene.light().send_signal(signal.SIGTERM)
    scene.processes[0].wait(LIMIT_S)
    run = ("--dir", str(scene.run.path))
    code, text = craft(inspect.status, *run)
    assert (code, "no lighthouse answers" in text) == (2, True)
    code, text = craft(inspect.events, *run)
    assert (code, "LighthouseStarted" in text) == (0, True)


FORGED = "evil\n12:00:00 event   Stop               all is well\x1b[2J\x1b]0;t\x07 [bold]"


def test_the_commands_print_no_escape_sequence_and_no_forged_line(scene: Scene) -> None:
    process = scene.light("--heartbeat-limit", "30", workers=2)

    async def story(cast: Cast) -> None:
        agent = await cast.agent()
        await agent.report(worker("w0"), worker("w1"))
        await agent.directive(at(1))
        scene.client.report_failure(worker_id="w1", reason=FORGED)

        def look() -> None:
            for command in (inspect.status, inspect.events):
                code, said = craft(command, "--dir", str(scene.run.path))
                assert code == 0, said
                assert all(each.isprintable() or each == "\n" for each in said), said
                assert "[bold]" in said
                assert not [line for line in said.splitlines() if line.startswith("12:00:00")]
            code, said = craft(inspect.status, "--dir", str(scene.run.path), "--json")
            assert json.loads(said)["fault_list"][0]["reason"] == FORGED
            refusal = craft(inspect.fail, "--dir", str(scene.run.path), FORGED)
            assert refusal[0] == 2
            assert "\x1b" not in refusal[1]

        await asyncio.to_thread(look)

    play(scene, story)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)
