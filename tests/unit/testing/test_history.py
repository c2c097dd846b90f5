"""Every violation of P1 to P3 is found in the files of a run, and an untouched run has none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from craft.protocol.errors import ConfigError
from craft.testing.history import check

from .runs import DROPPING, STEPS, Files, commit, finished, joined, spread, write_lines


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
        journal({"kind": "event", "event": "StateDiverged", "step": 3, "detail": "w0 | w1", "worker_ids": []}),
        "P1: the state diverged at step 3: w0 | w1",
    ),
    "step missing everywhere": (
        lambda files: [files.steps[worker].pop(1) for worker in ("w0", "w1")],
        "P2: step 1 of 4 was not committed",
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
        "P2: step 3: microbatch 1 belongs to w7, which is not a worker of the job",
    ),
    "own microbatches": (
        edit_commit("w0", 3, microbatches=[0, 1]),
        "P2: step 3: w0 wrote down microbatches [0, 1] as its own, and its plan says [0, 1, 2, 3]",
    ),
    "dropped under redo": (
        edit_commit("w0", 2, plan=DROPPING, microbatches=[0, 1, 3]),
        "P2: step 2: microbatch 2 was not computed, though lost ones are to be redone",
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
        "P3: step 9 is in metrics.jsonl, but was not committed",
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


def test_a_worker_that_joined_late_has_no_earlier_steps(files: Files) -> None:
    del files.steps["w1"][0]
    assert check(files.write(), "d1").violations == ()


@pytest.mark.parametrize(("step", "known"), [(STEPS, True), (STEPS - 1, False)])
def test_a_worker_that_took_the_state_after_the_last_step_wrote_none_down(files: Files, step: int, known: bool) -> None:
    files.steps["w2"] = []
    files.entries["w2"] = [joined("w2", step, 3)]
    files.journal.insert(-1, {"kind": "action", "action": "Propose", "generation": 3, "members": ["w0", "w2"]})
    files.journal.append(finished("w2"))
    sentence = "P2: w2 finished after 4 steps, of which the last that it wrote down is None, but the job has 4"
    expected = () if known else (sentence,)
    assert check(files.write(), "d1").violations == expected
    hosts = spread(files)
    write_lines(hosts[1] / "workers" / "w2" / "generations.jsonl", files.entries["w2"])
    assert check(files.folder, "d1", hosts).violations == expected


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
