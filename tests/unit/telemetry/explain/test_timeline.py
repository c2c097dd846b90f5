"""A fault as a story, from the files of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from craft.cli.main import main
from craft.telemetry.explain.incidents import incidents
from craft.telemetry.explain.sentences import brief
from craft.telemetry.explain.timeline import timeline
from craft.telemetry.history import read_run

T = 1000.0


def joined(worker_id: str, at: float, place: int, late: bool = False) -> dict[str, Any]:
    member = {"worker_id": worker_id, "host": "node7", "local_rank": place, "late": late}
    return {"time": at, "kind": "event", "event": "WorkerJoined", "member": member, "pid": 1}


def lost(worker_id: str, at: float, **more: Any) -> dict[str, Any]:
    found = {"time": at + 0.001, "kind": "event", "event": "WorkerLost", "worker_id": worker_id, "seen": at}
    return {**found, "reason": "killed by SIGKILL", "source": "agent", **more}


def made(number: int, at: float, *members: str, **more: Any) -> dict[str, Any]:
    found = {"time": at, "kind": "action", "action": "Reconfigure", "generation": number, "members": list(members)}
    return {**found, "reason": "w1 lost (killed by SIGKILL): survivors redo its microbatches", "again": False, **more}


def fault(worker_id: str, at: float, generation: int, following: int | None) -> dict[str, Any]:
    found = {"time": at, "kind": "outcome", "outcome": "Fault", "worker_ids": [worker_id], "host": None, "cost": None}
    return {**found, "reason": "killed by SIGKILL", "generation": generation, "next_generation": following, "seen": at}


def overcome(generation: int, at: float, *worker_ids: str) -> list[dict[str, Any]]:
    told = {"worker_id": "w0", "generation": generation, "since": 1, "lost": list(worker_ids), "step": 11}
    work = {"lost_s": 0.043, "retried": [11], "redone": [2], "dropped": [], "redone_samples": 4, "dropped_samples": 0}
    cost = {"worker_ids": list(worker_ids), "generation": generation, "step": 11, "lost_ms": 43.0, "steps_retried": 1}
    counts = {"microbatches_redone": 1, "samples_redone": 4, "microbatches_dropped": 0, "samples_dropped": 0}
    return [
        {"time": at, "kind": "event", "event": "Recovered", **told, **work, "committed_at": at},
        {"time": at, "kind": "outcome", "outcome": "Cost", **cost, **counts},
    ]


def entry(generation: int, at: float, *members: str, **more: Any) -> dict[str, Any]:
    moments = {"told": at, "aborted": at + 0.0002, "met": at + 0.01, "entered": at + 0.011, "time": at + 0.012}
    settled = {
        "agreed": False,
        "lost": ["w1"],
        "joiners": [],
        "idle": [],
        "step": 11,
        "commits": False,
        "retried": True,
    }
    work = {"given": [2], "mine": [], "dropped": []}
    return {"generation": generation, "members": list(members), **moments, **settled, **work, **more}


def commit(step: int, at: float, generation: int, *microbatches: int) -> dict[str, Any]:
    plan = {str(number): "w0" for number in range(4)}
    done = {"step": step, "branch": 0, "time": at, "generation": generation, "world_size": 2, "plan": plan}
    return {**done, "microbatches": list(microbatches)}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """w1 of three is killed in step 11; w3 takes its place."""
    write(
        tmp_path / "journal.jsonl",
        [
            *(joined(f"w{number}", T - 10, number) for number in range(3)),
            made(1, T - 9, "w0", "w1", "w2", reason="everybody is here"),
            lost("w1", T),
            made(2, T + 0.002, "w0", "w2"),
            fault("w1", T, 1, 2),
            *overcome(2, T + 0.06, "w1"),
            joined("w3", T + 0.3, 1, late=True),
        ],
    )
    write(tmp_path / "workers/w0/generations.jsonl", [entry(2, T + 0.003, "w0", "w2", mine=[2])])
    write(tmp_path / "workers/w2/generations.jsonl", [entry(2, T + 0.003, "w0", "w2")])
    write(tmp_path / "workers/w0/steps.jsonl", [commit(10, T - 0.03, 1, 0, 1), commit(11, T + 0.05, 2, 0, 1, 2)])
    write(tmp_path / "workers/w1/steps.jsonl", [commit(10, T - 0.03, 1, 2)])
    write(tmp_path / "workers/w3/steps.jsonl", [commit(13, T + 0.5, 3), commit(14, T + 0.6, 3, 2)])
    return tmp_path


def test_a_loss_is_told_from_what_was_seen_to_what_it_cost(run_dir: Path) -> None:
    run = read_run(run_dir)
    (incident,) = incidents(run.journal)
    found = timeline(run, incident, 1)

    said = [(each.at_ms, each.who, each.what) for each in found.moments]
    assert said[0] == (-30.0, "w1", "commits step 10, its last")
    assert said[1] == (0.0, "agent of node7", "sees w1 end: killed by SIGKILL")
    assert said[2][:2] == (2.0, "lighthouse") and said[2][2].startswith(
        "decides: generation 2 of w0, w2, because w1 lost"
    )
    assert (3.0, "w2", "hears of generation 2, aborts its exchange in 0.2 ms") in said
    settled = "has met the other one and settled: step 11 goes on, microbatch 2 missing, and this one computes 2"
    assert (15.0, "w0", settled) in said
    assert (50.0, "w0", "commits step 11, with microbatch 2 of lost workers") in said
    assert said[-2:] == [
        (300.0, "w3", "replaces w1"),
        (600.0, "w3", "keeps pace: commits step 14, with microbatch 2"),
    ]
    assert found.outcome == "43 ms, step 11 taken up again, 1 microbatch (4 samples) computed again"
    assert found.places == {"w1": "w3"}


def test_craft_why_prints_the_story_for_people_and_for_programs(run_dir: Path) -> None:
    said = CliRunner().invoke(main, ["why", "--dir", str(run_dir)])
    assert said.exit_code == 0
    assert "fault 1 of 1" in said.output and "w1 was lost: killed by SIGKILL" in said.output
    assert "it cost: 43 ms" in said.output and "in the place of w1: w3" in said.output

    found = json.loads(CliRunner().invoke(main, ["why", "1", "--json", "--dir", str(run_dir)]).output)
    assert found["cost"]["microbatches_redone"] == 1 and found["worker_ids"] == ["w1"]


def test_what_workers_of_other_hosts_wrote_down_is_read_where_it_is(run_dir: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("host")
    (run_dir / "workers").rename(other / "workers")

    without = CliRunner().invoke(main, ["why", "--dir", str(run_dir)]).output
    said = CliRunner().invoke(main, ["why", "--dir", str(run_dir), "--host", str(other)]).output

    assert "aborts its exchange" not in without and "it cost: 43 ms" in without
    assert "aborts its exchange" in said and "commits step 11" in said


def test_craft_why_has_nothing_to_explain_where_nothing_failed(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", [joined("w0", T, 0), made(1, T, "w0", reason="everybody is here")])

    said = CliRunner().invoke(main, ["why", "--dir", str(tmp_path)])

    assert (said.exit_code, said.output) == (0, "nothing to explain: no worker was lost, and no exchange broke\n")
    assert CliRunner().invoke(main, ["why", "--all", "--json", "--dir", str(tmp_path)]).output == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["7"], "there is no fault 7 in this run, which had one"), (["0"], "0 is not in the range")],
)
def test_craft_why_says_what_is_wrong_with_its_input(run_dir: Path, arguments: list[str], words: str) -> None:
    said = CliRunner().invoke(main, ["why", *arguments, "--dir", str(run_dir)])

    assert said.exit_code == 2 and words in said.output


def test_a_directory_without_a_journal_is_refused(tmp_path: Path) -> None:
    said = CliRunner().invoke(main, ["why", "--dir", str(tmp_path)])

    assert said.exit_code == 2 and "has no journal" in said.output


def test_a_second_loss_during_the_recovery_is_part_of_the_same_story() -> None:
    journal = [
        made(1, T - 9, "w0", "w1", "w2"),
        *(lost("w1", T), made(2, T + 0.002, "w0", "w2"), fault("w1", T, 1, 2)),
        *(lost("w2", T + 0.01), made(3, T + 0.012, "w0"), fault("w2", T + 0.01, 2, 3)),
        *overcome(3, T + 0.06, "w1", "w2"),
        *(lost("w0", T + 1), fault("w0", T + 1, 3, None)),
    ]

    first, second = incidents(journal)

    assert first.worker_ids == ("w1", "w2") and first.recovered is not None and first.missed
    assert second.worker_ids == ("w0",) and not second.missed


def test_a_broken_exchange_is_a_story_of_its_own() -> None:
    broken = {
        "time": T,
        "kind": "event",
        "event": "ExchangeBroken",
        "worker_id": "w0",
        "generation": 1,
        "detail": "reset",
    }
    journal = [made(1, T - 9, "w0", "w1"), broken, made(2, T + 0.3, "w0", "w1", again=True), *overcome(2, T + 0.4)]

    (found,) = incidents(journal)

    assert found.faults == () and found.generation == 1 and found.began == T


def test_what_gloo_says_of_a_broken_connection_is_cut_to_what_matters() -> None:
    said = (
        "generation 1: rank 1: [/__w/third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:11656. This is"
        " typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
    )

    assert brief(said) == "rank 1: Connection closed by peer [127.0.0.1]:11656"
    assert brief("no connection to w3") == "no connection to w3"


def test_a_loss_that_is_not_overcome_yet_is_told_as_far_as_it_goes() -> None:
    journal = [made(1, T - 9, "w0", "w1"), lost("w1", T), made(2, T + 0.002, "w0"), fault("w1", T, 1, 2)]

    (found,) = incidents(journal)

    assert found.recovered is None and found.stop is None
