"""Every violation of P1 to P3 is found in the files of a run, and an untouched run has none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from craft.protocol.errors import ConfigError
from craft.testing.history import check

STEPS = 4
Lines = list[dict[str, Any]]


class Files:
    """A run of two workers, w0 and w1, in which w1 is lost in step 2, before anybody has committed it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        both = {"0": "w0", "1": "w0", "2": "w1", "3": "w1"}
        alone = dict.fromkeys(both, "w0")
        self.steps: dict[str, Lines] = {
            "w0": [commit("w0", step, 1, both) for step in (0, 1)] + [commit("w0", step, 2, alone) for step in (2, 3)],
            "w1": [commit("w1", step, 1, both) for step in (0, 1)],
        }
        self.metrics: Lines = [{"step": step, "time": 0.0, "loss": 1.0} for step in range(STEPS)]
        self.journal: Lines = [
            {"kind": "event", "event": "WorkerJoined", "member": {"worker_id": worker}} for worker in ("w0", "w1")
        ]
        self.journal += [
            {"kind": "action", "action": "Reconfigure", "generation": 1, "members": ["w0", "w1"]},
            {"kind": "event", "event": "WorkerLost", "worker_id": "w1", "reason": "killed by SIGKILL"},
            {"kind": "action", "action": "Reconfigure", "generation": 2, "members": ["w0"]},
            {"kind": "event", "event": "StepRetried", "generation": 2, "step": 2, "given": [2, 3], "dropped": []},
            finished("w0"),
        ]
        self.on_loss = "redo"

    def write(self) -> Path:
        for worker, lines in self.steps.items():
            write_lines(self.folder / "workers" / worker / "steps.jsonl", lines)
        write_lines(self.folder / "metrics.jsonl", self.metrics)
        write_lines(self.folder / "journal.jsonl", self.journal)
        (self.folder / "config.toml").write_text(f'[run]\non_loss = "{self.on_loss}"  # default\n')
        return self.folder


def commit(worker: str, step: int, generation: int, plan: Mapping[str, str | None], **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "branch": 0,
        "time": float(step),
        "generation": generation,
        "world_size": 2 if generation == 1 else 1,
        "microbatches": [int(number) for number, owner in plan.items() if owner == worker],
        "plan": plan,
        **more,
    }


def finished(worker: str, digest: str = "d1") -> dict[str, Any]:
    return {
        "kind": "event",
        "event": "WorkerFinished",
        "worker_id": worker,
        "step": STEPS,
        "digest": digest,
        "complete": True,
    }


def write_lines(path: Path, lines: Lines) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "run")


def test_an_untouched_run_has_no_violation(files: Files) -> None:
    report = check(files.write(), "d1")
    assert (report.violations, report.steps, report.digest, report.dropped) == ((), STEPS, "d1", ())


def test_another_run_can_be_the_reference(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other")
    assert check(files.write(), other.write()).violations == ()
    other.journal[-1]["digest"] = "d2"
    assert check(files.write(), other.write()).violations == (
        "P1: w0 finished with the state d1, the reference with d2",
    )


def test_a_reference_whose_workers_disagree_is_none(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other")
    other.journal.append(finished("w1", "d2"))
    with pytest.raises(ConfigError, match="2 different states"):
        check(files.write(), other.write())


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="is not the directory of a run"):
            check(path)


Change = Callable[[Files], object]


def edit_commit(worker: str, index: int, **changes: Any) -> Change:
    return lambda files: files.steps[worker][index].update(changes)


def drop_commit(worker: str, index: int) -> Change:
    return lambda files: files.steps[worker].__delitem__(index)


def journal(*lines: dict[str, Any]) -> Change:
    return lambda files: files.journal.extend(lines)


def without(event: str) -> Change:
    def change(files: Files) -> None:
        files.journal = [line for line in files.journal if line.get("event") != event]

    return change


def never_made(files: Files) -> None:
    files.journal = [line for line in files.journal if line.get("generation") != 2]


def repeat_metrics(files: Files) -> None:
    files.metrics.insert(2, dict(files.metrics[1]))


def swap_metrics(files: Files) -> None:
    files.metrics[1], files.metrics[2] = files.metrics[2], files.metrics[1]


OTHER_PLAN = {"0": "w0", "1": "w1", "2": "w1", "3": "w1"}
DROPPING = {"0": "w0", "1": "w0", "2": None, "3": "w0"}

VIOLATIONS: dict[str, tuple[Change, str]] = {
    "nobody finished": (without("WorkerFinished"), "P1: no worker finished"),
    "two final states": (
        journal(finished("w1", "d2")),
        "P1: workers finished with different states: w1 with d2",
    ),
    "other bits": (
        lambda files: files.journal[-1].update(digest="d9"),
        "P1: w0 finished with the state d9, the reference with d1",
    ),
    "diverged": (
        journal({"kind": "event", "event": "StateDiverged", "step": 3, "detail": "w0 | w1"}),
        "P1: the state diverged at step 3: w0 | w1",
    ),
    "step missing everywhere": (
        lambda files: [files.steps[worker].pop(1) for worker in ("w0", "w1")],
        "P2: step 1 of 4 was committed by nobody",
    ),
    "finished too early": (
        lambda files: files.journal[-1].update(step=3),
        "P2: w0 finished after 3 steps, of which the last that it wrote down is 3, but the job has 4",
    ),
    "gap in the plan": (
        edit_commit("w0", 3, plan={"0": "w0", "2": "w0"}, microbatches=[0, 2]),
        "P2: step 3: the plan of w0 has microbatches [0, 2], with gaps",
    ),
    "unknown owner": (
        edit_commit("w0", 3, plan={"0": "w0", "1": "w7"}, microbatches=[0]),
        "P2: step 3: microbatch 1 belongs to w7, which is no worker of the job",
    ),
    "own microbatches": (
        edit_commit("w0", 3, microbatches=[0, 1]),
        "P2: step 3: w0 wrote down microbatches [0, 1] as its own, and its plan says [0, 1, 2, 3]",
    ),
    "dropped under redo": (
        edit_commit("w0", 2, plan=DROPPING, microbatches=[0, 1, 3]),
        "P2: step 2: microbatch 2 was computed by nobody, though lost ones are to be redone",
    ),
    "gap in a worker's steps": (drop_commit("w0", 1), "P3: w0 committed step 2 after step 0"),
    "step twice": (edit_commit("w0", 2, step=1), "P3: w0 committed step 1 after step 1"),
    "branch goes back": (
        lambda files: [files.steps["w0"][index].update(branch=1) for index in (0, 1, 2)],
        "P3: w0 went back from branch 1 to 0",
    ),
    "branch jumps ahead": (
        lambda files: files.steps["w0"].pop(2) and files.steps["w0"][-1].update(branch=1),
        "P3: w0 began branch 1 at step 3, after step 1",
    ),
    "generation goes down": (
        edit_commit("w0", 3, generation=1, world_size=2),
        "P3: w0 committed step 3 under generation 1, after step 2 under generation 2",
    ),
    "older generation than another's": (
        lambda files: files.steps["w1"].extend(
            commit("w1", step, 1, files.steps["w0"][step]["plan"]) for step in (2, 3)
        ),
        "P3: w1 committed step 3 under generation 1, when step 2 had been committed under generation 2",
    ),
    "two plans for a step": (
        edit_commit("w1", 1, plan=OTHER_PLAN, microbatches=[1, 2, 3]),
        "P3: step 1: microbatch 1 is by w0 according to w0, and by w1 according to w1",
    ),
    "generation of nobody": (never_made, "P3: w0 committed step 2 under generation 2, which was never made"),
    "other world size": (
        edit_commit("w1", 0, world_size=3),
        "P3: w1 committed step 0 with 3 workers, but generation 1 has 2",
    ),
    "not a member": (
        lambda files: files.steps["w1"].append(commit("w1", 2, 2, files.steps["w0"][2]["plan"])),
        "P3: w1 committed step 2 under generation 2, in which it is not",
    ),
    "metrics missing": (lambda files: files.metrics.__delitem__(2), "P3: step 2 is in metrics.jsonl 0 times"),
    "metrics twice": (repeat_metrics, "P3: step 1 is in metrics.jsonl 2 times"),
    "metrics out of order": (swap_metrics, "P3: metrics.jsonl has step 1 after step 2"),
    "metrics of no step": (
        lambda files: files.metrics.append({"step": 9}),
        "P3: step 9 is in metrics.jsonl, and nobody committed it",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_found_and_said(files: Files, name: str) -> None:
    change, sentence = VIOLATIONS[name]
    change(files)
    violations = check(files.write(), "d1").violations
    assert sentence in violations, "\n".join(violations)


def test_under_shrink_a_dropped_microbatch_must_be_in_the_journal(files: Files) -> None:
    files.on_loss = "shrink"
    files.steps["w0"][2].update(plan=DROPPING, microbatches=[0, 1, 3])
    sentence = "P2: step 2: microbatch 2 was dropped, and the journal does not say so"
    assert check(files.write(), "d1").violations == (sentence,)
    files.journal[-2].update(given=[], dropped=[2])
    report = check(files.write(), "d1")
    assert (report.violations, report.dropped) == ((), ((2, 2),))


def test_a_rollback_is_no_violation(files: Files) -> None:
    """A new branch goes back to an earlier step; its metrics are there for each branch."""
    again = [{**line, "branch": 1} for line in files.steps["w0"][2:]]
    files.steps["w0"] += again
    files.metrics += [{**line, "branch": 1} for line in files.metrics[2:]]
    assert check(files.write(), "d1").violations == (
        "P3: steps from 2 on were committed in branch 1, and the journal does not say why",
    )
    files.journal.insert(-1, {"time": 0.0, "kind": "event", "event": "RolledBack", "branch": 1, "step": 2})
    assert check(files.write(), "d1").violations == ()


def begun_again(files: Files, at: int = 1) -> None:
    """Both die after step 3; w2 begins again after step ``at``, which leaves the steps from there on behind."""
    alone = dict.fromkeys("0123", "w2")
    files.steps["w2"] = [{**commit("w2", step, 3, alone), "branch": 1} for step in range(at, STEPS)]
    files.metrics = files.metrics[:3] + [{**line, "branch": 1} for line in files.metrics[at:]]
    end = next(place for place, line in enumerate(files.journal) if line.get("event") == "WorkerFinished")
    files.journal[end:] = [
        {"time": 0.0, "kind": "event", "event": "WorkerLost", "worker_id": "w0", "reason": "killed by SIGKILL"},
        {"time": 0.0, "kind": "action", "action": "Restore", "branch": 1, "step": at},
        {"time": 0.0, "kind": "event", "event": "WorkerJoined", "member": {"worker_id": "w2"}},
        {"time": 0.0, "kind": "action", "action": "Reconfigure", "generation": 3, "members": ["w2"]},
        {"time": 0.0, "kind": "event", "event": "CheckpointRestored", "branch": 1, "step": at},
        {**files.journal[end], "worker_id": "w2"},
    ]


def test_a_job_that_began_again_is_no_violation_though_nobody_wrote_the_metrics_of_its_last_step(files: Files) -> None:
    begun_again(files)
    assert check(files.write(), "d1").violations == ()


def test_steps_before_the_checkpoint_that_a_job_began_from_again_are_still_missed(files: Files) -> None:
    begun_again(files)
    del files.steps["w0"][0], files.steps["w1"][0]
    assert "P2: step 0 of 4 was committed by nobody" in check(files.write(), "d1").violations


def test_a_job_that_began_again_too_late_has_left_something_out(files: Files) -> None:
    begun_again(files, at=3)
    for worker in ("w0", "w1"):
        del files.steps[worker][1:]
    del files.metrics[1:3]
    found = check(files.write(), "d1").violations
    assert "P2: branch 1 begins at step 3, and what came before it ends with step 0" in found


def test_what_was_computed_once_more_has_given_the_same_numbers(files: Files) -> None:
    begun_again(files)
    files.metrics[-2]["loss"] = 2.0
    (found,) = check(files.write(), "d1").violations
    assert found.startswith("P1: step 2 was computed twice, and gave")


def test_a_run_that_began_from_a_checkpoint_has_no_earlier_steps(files: Files) -> None:
    for lines in (*files.steps.values(), files.metrics):
        del lines[:2]
    assert "P2: step 0 of 4 was committed by nobody" in check(files.write(), "d1").violations
    files.journal.insert(0, {"time": 0.0, "kind": "event", "event": "CheckpointRestored", "step": 2})
    assert check(files.write(), "d1").violations == ()


def test_a_worker_that_joined_late_has_no_earlier_steps(files: Files) -> None:
    del files.steps["w1"][0]
    assert check(files.write(), "d1").violations == ()


# A job of several hosts.


@pytest.fixture
def hosts(files: Files) -> list[Path]:
    """The same job on two hosts: w0 on the first, w1 on the second; the journal is with the lighthouse, elsewhere."""
    return spread(files)


def spread(files: Files) -> list[Path]:
    files.write()
    places = []
    for number, worker in enumerate(("w0", "w1")):
        place = files.folder.with_name(f"host{number}")
        write_lines(place / "workers" / worker / "steps.jsonl", files.steps[worker])
        (place / "config.toml").write_text(f'[run]\non_loss = "{files.on_loss}"  # default\n')
        places.append(place)
    write_lines(places[0] / "metrics.jsonl", files.metrics)
    for name in ("metrics.jsonl", "config.toml"):
        (files.folder / name).unlink()
    shutil.rmtree(files.folder / "workers")
    return places


def test_an_untouched_run_of_several_hosts_has_no_violation(files: Files, hosts: list[Path]) -> None:
    report = check(files.folder, "d1", hosts)
    assert (report.violations, report.steps, report.digest, report.dropped) == ((), STEPS, "d1", ())


def test_what_a_host_committed_that_was_cut_off_counts(files: Files) -> None:
    """It went on alone, in the old generation."""
    files.steps["w1"].append(commit("w1", 2, 1, {"0": "w0", "1": "w0", "2": "w1", "3": "w1"}))
    violations = check(files.folder, "d1", spread(files)).violations
    assert "P3: step 2: microbatch 2 is by w0 according to w0, and by w1 according to w1" in violations


def test_a_host_that_is_not_named_is_missed(files: Files, hosts: list[Path]) -> None:
    violations = check(files.folder, "d1", hosts[1:]).violations
    assert (
        "P2: w0 finished after 4 steps, of which the last that it wrote down is None, but the job has 2" in violations
    )


def test_leaders_of_several_hosts_may_write_down_the_same_step_with_the_same_values(
    files: Files, hosts: list[Path]
) -> None:
    write_lines(hosts[0] / "metrics.jsonl", files.metrics[:3])
    write_lines(hosts[1] / "metrics.jsonl", [{**line, "time": 9.0} for line in files.metrics[1:]])
    assert check(files.folder, "d1", hosts).violations == ()
    write_lines(hosts[1] / "metrics.jsonl", [{**line, "loss": 2.0} for line in files.metrics[2:]])
    assert check(files.folder, "d1", hosts).violations == (
        f"P3: step 2: metrics.jsonl of {hosts[0]} has {{'step': 2, 'loss': 1.0}}, that of {hosts[1]}"
        " {'step': 2, 'loss': 2.0}",
    )


def test_metrics_of_several_hosts_have_every_step_and_none_twice_in_a_file(files: Files, hosts: list[Path]) -> None:
    write_lines(hosts[0] / "metrics.jsonl", files.metrics[:1])
    write_lines(hosts[1] / "metrics.jsonl", [*files.metrics[2:], files.metrics[3], {"step": 9}])
    assert check(files.folder, "d1", hosts).violations == (
        "P3: step 1 is in metrics.jsonl 0 times",
        "P3: step 9 is in metrics.jsonl, and nobody committed it",
        f"P3: step 3 is in metrics.jsonl of {hosts[1]} 2 times",
    )


def test_under_shrink_several_hosts_may_drop_what_the_journal_says(files: Files) -> None:
    files.on_loss = "shrink"
    files.steps["w0"][2].update(plan=DROPPING, microbatches=[0, 1, 3])
    files.journal[-2].update(given=[], dropped=[2])
    report = check(files.folder, "d1", spread(files))
    assert (report.violations, report.dropped) == ((), ((2, 2),))


def test_a_directory_that_is_no_hosts_or_is_named_twice_is_refused(files: Files, hosts: list[Path]) -> None:
    with pytest.raises(ConfigError, match="is not the run directory of a host"):
        check(files.folder, "d1", [*hosts, files.folder])
    with pytest.raises(ConfigError, match="name each host once"):
        check(files.folder, "d1", [*hosts, hosts[0]])


def test_the_command_line_says_what_it_found(files: Files) -> None:
    def history(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-W", "error", "-m", "craft.testing.history", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    run = str(files.write())
    assert history(run, "d1") == (0, "P1 to P3 hold: 4 steps, state d1\n", "")
    assert history(run, "d2") == (1, "P1: w0 finished with the state d1, the reference with d2\n", "")
    assert history(run, run)[0] == 0
    assert history("nowhere") == (2, "", "nowhere is not the directory of a run: it has no journal\n")
    assert history()[0] == 2
    first, second = map(str, spread(files))
    assert history(run, "d1", "--host", first, "--host", second) == (0, "P1 to P3 hold: 4 steps, state d1\n", "")
    assert history(run, "--host", "nowhere")[0] == 2
