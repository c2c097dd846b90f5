"""Sharded jobs in operation: spares, drains, hangs, slow workers, hosts, a lost lighthouse; always the same bits (P1 to P3)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault
from craft.testing.history import check

from .hosts import LIGHTHOUSE, REPLACE, Hosts, MakeHosts, assert_ended_well
from .jobs import CRAFT, SCRIPTS, Job, Jobs, Result, describe, wait_for

TRAIN_SHARDED = SCRIPTS / "train_sharded.py"
TWO = ("--workers-per-replica", "2")
STEPS = 30
QUICK_HANGS = {
    "CRAFT_HANG_LIMIT_S": "1.5",
    "CRAFT_UPDATE_LIMIT_S": "1.5",
    "CRAFT_FIRST_STEP_LIMIT_S": "60",
    **REPLACE,
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directories of undisturbed jobs of one replica, by kind of model."""
    made = Jobs(tmp_path_factory.mktemp("sharded"))
    found = {}
    for kind in ("fsdp", "tp"):
        result = made.run(TRAIN_SHARDED, kind, "--steps", str(STEPS), workers=2, options=TWO)
        assert result.exit_code == 0, describe(result)
        found[kind] = result.run_dir
    made.end()
    return found


class Slow:
    """A job that is slow until the test lets it go."""

    def __init__(
        self,
        jobs: Jobs,
        go: Path,
        *options: str,
        kind: str = "fsdp",
        arguments: tuple[str, ...] = ("--slow", "0.05"),
        **more: Any,
    ) -> None:
        self.kind = kind
        self._go = go
        self.job: Job = jobs.start(
            TRAIN_SHARDED, kind, "--steps", str(STEPS), "--slow-until", str(go), *arguments,
            options=(*TWO, *options), **more,
        )  # fmt: skip
        self.job.reach_step(4)

    def ends_exactly(self, references: dict[str, Path]) -> Result:
        self._go.touch()
        result = self.job.wait()
        assert result.exit_code == 0, describe(result)
        assert check(result.run_dir, references[self.kind]).violations == (), describe(result)
        return result


def status(job: Job) -> dict[str, Any]:
    command = [*CRAFT, "status", "--dir", str(job.run_dir), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def members(job: Job) -> dict[str, tuple[int, int]]:
    """Replica and position of the members, by worker."""
    workers = status(job)["workers"]
    return {each["worker_id"]: (each["replica"], each["position"]) for each in workers if each["rank"] is not None}


def of(result: Result, kind: str) -> list[dict[str, Any]]:
    return [line for line in result.run.journal if kind in (line.get("event"), line.get("action"))]


@pytest.mark.parametrize(
    ("victim", "moved"), [("w1", True), pytest.param("w2", False, marks=pytest.mark.long)], ids=["elsewhere", "there"]
)
def test_a_spare_takes_the_slot_or_is_started_again_at_its_position_P1(
    jobs: Jobs, references: dict[str, Path], tmp_path: Path, victim: str, moved: bool
) -> None:
    slow = Slow(jobs, tmp_path / "go", "--spares", "1")
    job = slow.job
    wait_for(lambda: "w4" in job.pids(), "the spare has joined")
    spare = next(each for each in status(job)["workers"] if each["worker_id"] == "w4")
    assert (spare["state"], spare["rank"], spare["replica"], spare["position"]) == ("waiting", None, None, 0)
    before, place = job.pids(), members(job)[victim]
    job.kill(victim)
    newcomer = "w5" if moved else "w4"
    wait_for(lambda: members(job).get(newcomer) == place, f"{newcomer} has the slot")
    after = job.pids()
    result = slow.ends_exactly(references)

    assert all(after[worker] == pid for worker, pid in before.items() if worker not in (victim, "w4"))
    assert [(line["worker_id"], line["position"]) for line in of(result, "MoveSpare")] == ([("w4", 1)] if moved else [])
    assert newcomer in (of(result, "Propose" if moved else "Reconfigure")[-1]["members"])
    lines = result.run.commits["w3" if place[0] == 0 else "w1"]
    assert {(line.replica, line.position) for line in lines} == {(1 - place[0], 1)}
    assert all(line.microbatches for line in lines), "every position lists what its replica computed"


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("fsdp", Fault(point="forward", kind="sleep", seconds=1000, step=6, rank=1)),
        ("tp", Fault(point="before_clip", kind="sleep", seconds=1000, step=6, rank=2)),
        pytest.param("tp", Fault(point="forward", kind="sleep", seconds=1000, step=6, rank=0), marks=pytest.mark.long),
        pytest.param(
            "fsdp", Fault(point="after_clip", kind="sleep", seconds=1000, step=6, rank=3), marks=pytest.mark.long
        ),
        pytest.param("fsdp", Fault(point="batch", kind="stop", step=6, rank=3), marks=pytest.mark.long),
        ("tp", Fault(point="forward", kind="stop", step=6, rank=3)),
    ],
    ids=["forward", "update", "tp-forward", "after_clip", "stopped-at-batch", "tp-stopped"],
)
def test_the_worker_that_hangs_is_lost_and_not_those_that_wait_for_it_P1_P5(
    jobs: Jobs, references: dict[str, Path], kind: str, fault: Fault
) -> None:
    result = jobs.run(
        TRAIN_SHARDED,
        kind,
        "--steps",
        str(STEPS),
        "--slow",
        "0.02",
        options=TWO,
        environment=QUICK_HANGS,
        faults=[fault],
    )

    assert result.exit_code == 0, describe(result)
    assert check(result.run_dir, references[kind]).violations == (), describe(result)
    (lost,) = result.events("WorkerLost")
    assert lost["worker_id"] == result.struck[0] and lost["source"] == "watch", describe(result)


def test_with_wait_one_process_is_waited_for_and_replaced_P1(
    jobs: Jobs, references: dict[str, Path], tmp_path: Path
) -> None:
    slow = Slow(jobs, tmp_path / "go", "--on-loss", "wait", environment=REPLACE)
    slow.job.kill("w1")
    wait_for(lambda: "w4" in slow.job.committing(), "the replacement commits")
    result = slow.ends_exactly(references)

    (held,) = of(result, "Hold")
    assert "w1 (replica 0, position 1) lost" in held["reason"]
    assert of(result, "Reconfigure")[-1]["members"] == ["w0", "w2", "w3", "w4"]


def test_with_shrink_the_microbatches_of_the_replica_are_dropped_P2(jobs: Jobs) -> None:
    fault = Fault(point="forward", step=6, worker="w1")
    result = jobs.run(TRAIN_SHARDED, "fsdp", options=(*TWO, "--on-loss", "shrink"), faults=[fault])

    assert result.exit_code == 0, describe(result)
    report = check(result.run_dir)
    assert report.violations == (), describe(result)
    assert len(report.dropped) == 2, "those that its replica had not sent"


def test_without_restarts_a_lost_position_ends_the_job_with_a_reason(jobs: Jobs) -> None:
    faults = [Fault(point="forward", step=6, worker="w1"), Fault(point="forward", step=8, worker="w3")]
    result = jobs.run(TRAIN_SHARDED, "fsdp", options=TWO, faults=faults)

    assert result.exit_code == 3, describe(result)
    assert "position 1" in result.output, describe(result)


def test_workers_that_are_not_whole_replicas_are_refused_by_name(jobs: Jobs) -> None:
    result = jobs.run(TRAIN_SHARDED, "fsdp", workers=3, options=TWO)

    assert result.exit_code == 2
    assert "3 workers are not whole replicas of 2: give --workers 2 or 4" in result.errors, result.errors


def test_a_drained_worker_leaves_and_the_last_of_a_position_stays_P1(
    jobs: Jobs, references: dict[str, Path], tmp_path: Path
) -> None:
    slow = Slow(jobs, tmp_path / "go")
    job = slow.job
    job.client.drain(worker_id="w1")
    wait_for(lambda: "w1" not in members(job), "w1 has left")
    before = job.pids()
    job.client.drain(worker_id="w3")
    job.reach_step(job.steps() + 3)
    assert "w3" in members(job), "no other worker has its part of the state"
    after = job.pids()
    result = slow.ends_exactly(references)

    assert after == before
    assert result.events("WorkerLost") == []


def test_a_worker_that_is_reported_while_there_is_no_lighthouse_is_replaced_P1_P4(
    jobs: Jobs, references: dict[str, Path], tmp_path: Path
) -> None:
    slow = Slow(jobs, tmp_path / "go", environment=REPLACE)
    job = slow.job
    os.kill(status(job)["lighthouse"]["pid"], signal.SIGKILL)
    job.kill("w2")
    wait_for(lambda: len(job.committing()) == 5, "a replacement commits")
    place = members(job)["w4"]
    job.client.report_failure(worker_id="w1", reason="its fan is loud")
    wait_for(lambda: len(job.committing()) == 6, "another one commits")
    result = slow.ends_exactly(references)

    assert place == (1, 0)
    assert len(result.events("LighthouseStarted")) == 2
    assert {line["worker_id"]: line["source"] for line in result.events("WorkerLost")} == {"w2": "agent", "w1": "api"}
    said = subprocess.run([*CRAFT, "why", "1", "--dir", str(job.run_dir)], capture_output=True, text=True, check=True)
    assert "w2 (replica 1, position 0) was lost" in said.stdout
    assert "replicas in generation 1: 0: w0, w1; 1: w2, w3" in said.stdout


def test_a_slow_worker_is_named_and_microbatches_move_between_replicas_P1(
    jobs: Jobs, references: dict[str, Path], tmp_path: Path
) -> None:
    """Its mate waits for it in collectives, which does not count as slow."""
    slow = Slow(jobs, tmp_path / "go", arguments=("--slow", "0.3", "--slow-worker", "w1"))
    job = slow.job

    def found() -> bool:
        assert job.process.poll() is None, "the job ended before"
        return any(line.get("event") == "StragglerFound" and line["worker_id"] == "w1" for line in job.journal())

    wait_for(found, "w1 is found to be slow")
    job.reach_step(job.steps() + 2)
    result = slow.ends_exactly(references)

    assert "w0" not in {line["worker_id"] for line in result.events("StragglerFound")}
    owners = [list(line.plan.values()) for line in result.run.commits["w0"]]
    assert min(each.count("w0") for each in owners) < 2, "others have more"


def begin_on(hosts: Hosts, go: Path, *options: str, **more: Any) -> None:
    hosts.light("--workers-per-replica", "2", limit_s=5)
    for name in hosts.names:
        hosts.start(
            name,
            "fsdp",
            "--steps",
            str(STEPS),
            "--slow",
            "0.05",
            "--slow-until",
            str(go),
            options=(*TWO, *options),
            **more,
        )
    hosts.reach_step(4)


def assert_same_bits(hosts: Hosts, reference: Path) -> None:
    report = hosts.check(reference)
    assert report.violations == (), "\n".join(report.violations) + hosts.tell()


def test_a_host_that_holds_a_whole_replica_is_drained_P1(
    make_hosts: MakeHosts, references: dict[str, Path], tmp_path: Path
) -> None:
    hosts = make_hosts("a", "b", workers=2, script=TRAIN_SHARDED)
    begin_on(hosts, tmp_path / "go")
    assert [line["slots"] for line in hosts.journal() if line.get("slots")][-1] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    drain = [*hosts.network.inside(LIGHTHOUSE), *CRAFT, "drain", "b", "--dir", str(hosts.run_dir)]
    subprocess.run(drain, check=True, capture_output=True)
    wait_for(lambda: hosts.members() == ["a-w0", "a-w1"] and not hosts.living("b"), "b has left")
    (tmp_path / "go").touch()
    assert_ended_well(hosts, "a")
    assert_same_bits(hosts, references["fsdp"])
    assert hosts.lost() == set()


@pytest.mark.long
def test_a_host_that_holds_parts_of_replicas_dies_and_the_rest_forms_a_replica_P1(
    make_hosts: MakeHosts, references: dict[str, Path], tmp_path: Path
) -> None:
    """Two hosts of three workers each: positions 0, 1, 0 and 1, 0, 1."""
    hosts = make_hosts("a", "b", workers=3, script=TRAIN_SHARDED)
    begin_on(hosts, tmp_path / "go")
    hosts.kill("b")
    hosts.reach_step(hosts.steps("a") + 3, "a")
    (tmp_path / "go").touch()
    assert_ended_well(hosts, "a")
    assert_same_bits(hosts, references["fsdp"])
    assert hosts.lost() == {"b-w0", "b-w1", "b-w2"}
