"""Before, between and after the loops of a script: what is done there survives the worker that does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault

from .jobs import SCRIPTS, Jobs, References, Result, describe

SCRIPT = SCRIPTS / "loops.py"
STEPS = 20
REPLACED = {"CRAFT_MAX_RESTARTS": "20"}


@pytest.fixture(scope="module")
def reference(references: References, tmp_path_factory: pytest.TempPathFactory) -> str:
    return references.digest_of(SCRIPT, "--out", str(tmp_path_factory.mktemp("alone")), workers=1)


def out_of(result: Result, out: Path) -> str:
    """What the leader wrote after the last loop."""
    assert (out / "leader.pt").exists() and (out / "once.pt").exists(), describe(result)
    return (out / "leader").read_text()


def left_behind(result: Result) -> int:
    """Workers that were still joining in a loop when the others had gone on to the next one; others came."""
    return sum("LeftBehind" in log.read_text() for log in result.run_dir.glob("workers/*/log"))


def test_a_script_with_epochs_and_two_loops_has_the_same_bits_at_any_worker_count_P1(
    jobs: Jobs, reference: str, tmp_path: Path
) -> None:
    result = jobs.run(SCRIPT, "--out", str(tmp_path), "--loader-processes", "1", workers=3)
    result.assert_exact(reference, faults=0, steps=STEPS)
    assert out_of(result, tmp_path).startswith("w0 rank 0 of 3: ")
    assert (tmp_path / "downloads").read_text() == "w0\n"


@pytest.mark.parametrize(
    ("point", "step", "rank"),
    [
        ("leads", 20, 0),
        ("saving", 20, 0),
        ("download", 0, 0),
        pytest.param("between", 10, 1, marks=pytest.mark.long),
        pytest.param("updated", 4, 0, marks=pytest.mark.long),
        pytest.param("updated", 9, 1, marks=pytest.mark.long),
        pytest.param("updated", 19, 0, marks=pytest.mark.long),
    ],
)
def test_what_a_lost_worker_did_outside_of_the_steps_is_done_by_another_P1(
    jobs: Jobs, reference: str, tmp_path: Path, point: str, step: int, rank: int
) -> None:
    fault = Fault(point=point, step=step, rank=rank)
    result = jobs.run(SCRIPT, "--out", str(tmp_path), workers=3, faults=[fault], environment=REPLACED)
    assert len(result.struck) == 1, describe(result)
    result.assert_exact(reference, faults=1 + left_behind(result), steps=STEPS)
    who = out_of(result, tmp_path).split(":")[0]
    # The rank of a worker that was lost after the loop is that of the one that takes its place.
    assert who == ("w3 rank 0 of 3" if point == "leads" else who), describe(result)
    assert "rank 0" in who
    assert (tmp_path / "downloads").read_text() == ("w1\n" if point == "download" else "w0\n")


def test_a_newcomer_passes_over_a_loop_that_the_job_has_ended_P1(jobs: Jobs, reference: str, tmp_path: Path) -> None:
    faults = [Fault(point="updated", step=12, rank=0), Fault(point="leads", worker="w1")]
    result = jobs.run(
        SCRIPT, "--out", str(tmp_path), "--slow-s", "0.05", workers=2, faults=faults, environment=REPLACED
    )
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(reference, faults=2 + left_behind(result), steps=STEPS)
    assert "rank 0 of 2" in out_of(result, tmp_path), describe(result)


def test_leaving_a_loop_by_break_on_all_workers_is_an_end_and_no_fault_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    expected = references.digest_of(SCRIPT, "--out", str(alone), "--break-at", "15", workers=1)
    result = jobs.run(SCRIPT, "--out", str(shared), "--break-at", "15", workers=3)
    result.assert_exact(expected, faults=0, steps=16)
    assert (alone / "leader").read_text().split(": ")[1] == (shared / "leader").read_text().split(": ")[1]


def test_without_a_replacement_a_worker_that_is_lost_after_the_loop_is_an_error(jobs: Jobs, tmp_path: Path) -> None:
    fault = Fault(point="leads", step=20, rank=0)
    environment = {"CRAFT_MAX_RESTARTS": "0"}
    result = jobs.run(SCRIPT, "--out", str(tmp_path), workers=2, faults=[fault], environment=environment)
    assert result.exit_code == 3, describe(result)
    assert "w0 (killed by SIGKILL) was lost after the last step and before the end of the script" in result.output
    assert "job.once" in result.output


def test_an_exception_after_the_loop_that_comes_again_is_a_bug_of_the_script(jobs: Jobs, tmp_path: Path) -> None:
    result = jobs.run(SCRIPT, "--out", str(tmp_path), "--exit", "raise", workers=2, environment=REPLACED)
    assert result.exit_code == 1, describe(result)
    assert "OSError: No space left on device" in result.output + result.errors


@pytest.mark.long
def test_code_after_the_loop_that_changed_the_state_is_not_run_again_in_silence(jobs: Jobs, tmp_path: Path) -> None:
    fault = Fault(point="leads", step=20, rank=0)
    result = jobs.run(
        SCRIPT, "--out", str(tmp_path), "--change-after-loop", workers=2, faults=[fault], environment=REPLACED
    )
    assert result.exit_code == 3, describe(result)
    assert "code after the training loop changed the training state" in result.output + describe(result)


def test_a_worker_that_took_the_result_of_a_call_leaves_a_job_that_begins_anew_P1(jobs: Jobs, tmp_path: Path) -> None:
    """The others of that job make the call again, and would wait for it."""
    script = SCRIPTS / "anew.py"
    result = jobs.run(script, str(tmp_path), "kills", workers=2, environment=REPLACED)

    undisturbed = jobs.run(script, str(tmp_path), workers=2)
    assert (result.exit_code, result.digest) == (0, undisturbed.digest), describe(result)
    assert left_behind(result) == 1, describe(result)
