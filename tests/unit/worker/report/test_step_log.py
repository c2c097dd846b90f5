"""Records of a worker: its commits and, on the leader, the metrics of every step once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.small_disk import fill, mounted

from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.worker.report.step_log import Committed, StepAccount, StepLog

MEMBERS = ("w0", "w1", "w2")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def commit(log: StepLog, step: int, members: tuple[str, ...] = MEMBERS) -> None:
    log.committed(
        Committed(
            step=step,
            branch=0,
            generation=4 - len(members),
            members=members,
            plan=("w0", "w1", "w1", None),
            metrics={"loss": step / 2},
        )
    )
    log.flush()


def metrics(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(run_dir / "metrics.jsonl")]


def test_every_commit_is_one_line_with_the_whole_plan(tmp_path: Path) -> None:
    commit(StepLog(RunDir(tmp_path).create().path, "w1"), 7)

    (line,) = lines(tmp_path / "workers" / "w1" / "steps.jsonl")
    assert isinstance(line.pop("time"), float)
    assert line == {
        "step": 7,
        "branch": 0,
        "generation": 1,
        "world_size": 3,
        "microbatches": [1, 2],
        "plan": {"0": "w0", "1": "w1", "2": "w1", "3": None},
    }


def test_only_the_leader_writes_metrics(tmp_path: Path) -> None:
    workers = {worker_id: StepLog(tmp_path, worker_id) for worker_id in MEMBERS}

    for step in range(3):
        for log in workers.values():
            commit(log, step)

    assert metrics(tmp_path) == [(0, 0.0), (1, 0.5), (2, 1.0)]


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_new_leader_writes_what_the_old_one_did_not(tmp_path: Path, behind: int) -> None:
    """The old one may have died between its commit and its line, or been slow for a few steps."""
    workers = {worker_id: StepLog(tmp_path, worker_id) for worker_id in MEMBERS}
    for step in range(5):
        for worker_id, log in workers.items():
            if worker_id != "w0" or step < 5 - behind:
                commit(log, step)

    for step in range(5, 8):
        for worker_id in ("w1", "w2"):
            commit(workers[worker_id], step, ("w1", "w2"))

    assert metrics(tmp_path) == [(step, step / 2) for step in range(8)]


def test_a_leader_of_a_leader_takes_over_too(tmp_path: Path) -> None:
    workers = {worker_id: StepLog(tmp_path, worker_id) for worker_id in MEMBERS}

    for step, alive in enumerate([MEMBERS, MEMBERS[1:], MEMBERS[2:], MEMBERS[2:]]):
        for worker_id in alive:
            commit(workers[worker_id], step, alive)

    assert metrics(tmp_path) == [(step, step / 2) for step in range(4)]


def test_a_leader_that_dies_before_the_first_line_is_followed_as_well(tmp_path: Path) -> None:
    commit(StepLog(tmp_path, "w1"), 0, ("w1",))

    assert metrics(tmp_path) == [(0, 0.0)]


def test_a_line_that_was_torn_does_not_stop_the_next_leader(tmp_path: Path) -> None:
    """A full disk may cut a line short; training goes on."""
    commit(StepLog(tmp_path, "w0"), 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "ti')

    heir = StepLog(tmp_path, "w1")
    commit(heir, 1)
    commit(heir, 2, ("w1",))

    whole = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["step"] for line in whole] == [0, 1, 2]


def test_a_line_that_lacks_nothing_but_its_end_is_not_written_twice(tmp_path: Path) -> None:
    commit(StepLog(tmp_path, "w0"), 0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))

    heir = StepLog(tmp_path, "w1")
    commit(heir, 0)
    commit(heir, 1, ("w1",))

    assert [step for step, _ in metrics(tmp_path)] == [0, 1]


def test_without_a_run_directory_nothing_is_written(tmp_path: Path) -> None:
    commit(StepLog(None, "w0"), 0)

    assert list(tmp_path.iterdir()) == []


def test_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    commit(StepLog(RunDir(tmp_path).create().path, "w0"), 0)

    for path in (tmp_path / "metrics.jsonl", tmp_path / "workers" / "w0" / "steps.jsonl"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_full_disk_is_told_once_and_nothing_is_missing_in_the_end(tmp_path: Path) -> None:
    told: list[str] = []
    with mounted(tmp_path / "disk", "256k") as disk:
        log = StepLog(RunDir(disk).create().path, "w0", told.append)
        commit(log, 0)
        filler = fill(disk)
        for step in range(1, 300):
            commit(log, step)
        (trouble,) = told
        assert "cannot be written: No space left on device" in trouble
        filler.unlink()
        for step in range(300, 310):
            commit(log, step)
        log.complete()
        assert told == [trouble, ""]
        steps = [line["step"] for line in read_lines(disk / "workers" / "w0" / "steps.jsonl")]
        assert steps == list(range(310))
        assert [line["step"] for line in read_lines(disk / "metrics.jsonl")] == list(range(310))


def test_a_step_never_takes_negative_time_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    account = StepAccount(None, "w0", lambda _: None, lambda step, microbatch: None, lambda trouble: None)
    account.begin()
    clock = time.time() - 3600.0
    monkeypatch.setattr(time, "time", lambda: clock)
    account.committed(
        Committed(step=0, branch=0, generation=1, members=("w0",), plan=("w0",), metrics={}),
    )
    assert 0.0 <= account.step_s < 60.0
