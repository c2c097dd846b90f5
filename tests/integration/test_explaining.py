"""A job explains itself: what a fault cost, how it went, what a worker does, and why nobody gets on."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from craft.cli.main import main
from craft.protocol.errors import ConfigError
from craft.settings.rundir import RunDir
from craft.testing import Fault

from .jobs import SCRIPTS, TRAIN, Job, Jobs, Result, wait_for

HANGS = SCRIPTS / "hangs.py"
COLLECTIVES = SCRIPTS / "collectives.py"
QUICK = {"CRAFT_HANG_LIMIT_S": "1.5", "CRAFT_UPDATE_LIMIT_S": "1.5", "CRAFT_FIRST_STEP_LIMIT_S": "60"}

PATIENT = {"CRAFT_HANG_LIMIT_S": "100", "CRAFT_STOP_LIMIT_S": "100"}


def craft(*arguments: str, run_dir: Path) -> str:
    done = CliRunner().invoke(main, [*arguments, "--dir", str(run_dir)])
    assert done.exit_code == 0, done.output
    return done.output


def outcomes(result: Result, name: str) -> list[dict[str, Any]]:
    return [line for line in result.run.journal if line.get("outcome") == name]


def test_what_a_killed_worker_cost_is_what_the_others_wrote_down_and_craft_why_tells_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    slow = ("--slow-until", str(tmp_path / "hurry"))
    job = jobs.start(TRAIN, "--steps", "80", *slow, workers=3, environment={"CRAFT_MAX_RESTARTS": "20"})
    job.reach_step(10)
    job.kill("w1")
    wait_for(lambda: any(line.get("outcome") == "Cost" for line in job.journal()), "its cost is known")
    while_it_runs = craft("why", run_dir=job.run_dir)
    job.wait_for_committing(4)
    (tmp_path / "hurry").touch()
    result = job.wait()

    (cost,), (told,) = outcomes(result, "Cost"), result.events("Recovered")
    assert cost["worker_ids"] == ["w1"] and cost["lost_ms"] >= 0
    firsts = [
        next(each for each in commits if each.generation >= cost["generation"])
        for worker_id, commits in result.run.commits.items()
        if worker_id in ("w0", "w2")
    ]
    by_survivors = {microbatch for first in firsts if first.step == told["step"] for microbatch in first.microbatches}
    assert set(told["redone"]) <= by_survivors
    (first, *_) = [first for first in firsts if first.step == told["step"]]
    if told["redone"]:
        assert not any(owner == "w1" for number, owner in first.plan.items() if number in told["redone"])
        assert cost["samples_redone"] > 0 and cost["steps_retried"] == 1
    assert cost["microbatches_redone"] == len(told["redone"])
    story = craft("why", run_dir=result.run_dir)
    for said in (while_it_runs, story):
        assert "w1 was lost: killed by SIGKILL" in said and "sees w1 end" in said
        assert (
            "decides: generation" in said and "aborts its exchange" in said and f"commits step {told['step']}" in said
        )
        assert f"it cost: {cost['lost_ms']:.0f} ms" in said
    assert "in the place of w1: w3" in story
    assert "the loss of w1 cost" in craft("events", run_dir=result.run_dir)
    assert json.loads(craft("why", "1", "--json", run_dir=result.run_dir))["cost"]["lost_ms"] == cost["lost_ms"]


@pytest.mark.long
def test_a_second_loss_while_the_first_is_overcome_and_a_killed_lighthouse_leave_the_costs_right(jobs: Jobs) -> None:
    """Of 8 microbatches over 4 workers, w1 never computes its two, and w2 dies with its own two in hand."""
    faults = [
        Fault(point="batch", step=3, worker="w1"),
        Fault(point="claimed", step=3, worker="w2"),
        Fault(point="batch", worker="w0", after_file="now"),
    ]
    job = jobs.start(TRAIN, "--steps", "300", workers=4, faults=faults)

    def costs() -> list[dict[str, Any]]:
        return [line for line in job.journal() if line.get("outcome") == "Cost"]

    wait_for(costs, "the first two losses are overcome")
    lighthouse = job.client.get_status()["lighthouse"]["pid"]
    psutil.Process(lighthouse).kill()
    wait_for(
        lambda: sum(line.get("event") == "LighthouseStarted" for line in job.journal()) == 2, "another one is there"
    )
    (job.run_dir / "now").touch()
    wait_for(lambda: len(costs()) == 2, "the third loss is overcome")
    wait_for(lambda: job.client.get_status()["faults"] == 3, "the new lighthouse knows of all")
    known = job.client.get_status()["fault_list"]
    job.end()

    first, second = costs()
    assert (first["worker_ids"], first["step"], first["steps_retried"]) == (["w1", "w2"], 3, 1)
    assert (first["microbatches_redone"], first["samples_redone"]) == (4, 16)
    assert (second["worker_ids"], second["microbatches_redone"], second["samples_redone"]) == (["w0"], 4, 16)
    assert [fault["cost"]["generation"] for fault in known] == [first["generation"]] * 2 + [second["generation"]]
    told = craft("why", "--all", run_dir=job.run_dir)
    assert "fault 1 of 2" in told and "w1 was lost: killed by SIGKILL; w2 was lost: killed by SIGKILL" in told


def test_a_worker_is_looked_at_while_it_hangs_waits_or_is_stopped(jobs: Jobs) -> None:
    job = jobs.start(HANGS, "--kind", "deadlock", workers=3, environment=PATIENT)
    hung = RunDir(job.run_dir).path / "hung"
    wait_for(hung.exists, "one of them hangs")
    found = wait_for(lambda: settled(job), "the others wait for it")
    (stuck,) = [each for each in found.values() if each["phase"] == "computing"]
    waiting = [each for each in found.values() if each["phase"] == "exchanging"]
    assert stuck["step"] == 30 and "hangs.py" in stuck["stacks"] and stuck["microbatch"] is not None
    assert all(each["generation"] == 1 and each["rank"] == each["members"].index(each["worker_id"]) for each in waiting)
    assert [each["step"] for each in stuck["recent_steps"]] == list(range(20, 30))
    # All of them told their stacks themselves: the handler of the signal can end a process whose frames are changing.
    assert all(each["stacks"].startswith("Thread 0x") for each in found.values())
    assert [RunDir(job.run_dir).stacks(worker_id).stat().st_size for worker_id in found] == [0, 0, 0]

    psutil.Process(waiting[0]["pid"]).send_signal(signal.SIGSTOP)
    wait_for(lambda: job.client.debug(waiting[0]["worker_id"])["stopped"], "it is seen to be stopped")
    assert "stopped by a signal" in craft("debug", waiting[0]["worker_id"], run_dir=job.run_dir)
    with pytest.raises(ConfigError, match="there is no worker 'w9'"):
        job.client.debug("w9")
    folder = job.run_dir / "asked"
    told = craft("debug", "--all", "--out", str(folder), run_dir=job.run_dir)
    # Those who wait may be known by now to wait for the stopped one as well.
    waited_for = re.search(r"wait in the exchange for ([w\d, ]+)\.", told)
    assert waited_for is not None and stuck["worker_id"] in waited_for[1].split(", "), told
    assert {file.name for file in folder.iterdir()} == {"summary.txt", "w0.txt", "w1.txt", "w2.txt"}
    job.end()


def settled(job: Job) -> dict[str, dict[str, Any]] | None:
    """All three workers from close up, once two of them are known to wait for the third."""
    found = {worker_id: job.client.debug(worker_id) for worker_id in ("w0", "w1", "w2")}
    stuck = [worker_id for worker_id, each in found.items() if each["phase"] == "computing"]
    waits = [each["waits_for"] for each in found.values() if each["phase"] == "exchanging"]
    return found if waits == [stuck, stuck] else None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "missing rank: worker w2 has not come to all_reduce number"),
        pytest.param("order", "mismatched order: worker w2 is at broadcast number", marks=pytest.mark.long),
        pytest.param("size", "mismatched size: worker w2 is at all_reduce number", marks=pytest.mark.long),
    ],
)
def test_collectives_of_the_script_that_do_not_fit_are_named(jobs: Jobs, kind: str, words: str) -> None:
    job = jobs.start(COLLECTIVES, "--kind", kind, workers=3, environment=QUICK)
    summary = wait_for(lambda: next(job.run_dir.glob("diagnosis/*/summary.txt"), None), "a bundle is there")
    assert words in summary.read_text()
    if kind == "missing":
        assert "w2 waits in the exchange for w0, w1." in summary.read_text()
    assert "collectives.py" in (summary.parent / "w0.txt").read_text()
    assert (summary.parent / "w0.collectives.json").exists()
    job.end()
