"""The verdict: a silent difference, a hang and a refusal without a reason are findings; this test is why the fuzzer can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .driver import Driver
from .generator import Script, generate
from .kills import Plan
from .verdict import Outcome, judge

STEPS = {0: ("[('loss', 1.0)]",), 1: ("[('loss', 0.5)]",)}
SOUND = Outcome(exit_code=0, finals={"w0": "aa", "w1": "aa"}, steps=STEPS, files={"final.pt": "ff"})
REFUSED = (
    "craft: ended with exit code 1: craft.protocol.errors.ConfigError: the optimizer is not registered: job.register it"
)


def test_the_same_everywhere_is_exact() -> None:
    assert judge(SOUND, SOUND, mistake=None).kind == "exact"
    assert not judge(SOUND, SOUND, mistake="own_counter").finding


def test_another_final_state_is_different() -> None:
    found = judge(SOUND, replace(SOUND, finals={"w0": "aa", "w2": "bb"}), mistake=None)
    assert found.kind == "DIFFERENT"
    assert found.finding
    assert "w2 ends with bb, not aa" in found.detail


def test_a_silent_difference_is_a_finding_for_a_script_with_a_mistake_too() -> None:
    assert judge(SOUND, replace(SOUND, finals={"w0": "bb"}), mistake="own_counter", says="count").finding


def test_a_step_that_gave_something_else_is_different() -> None:
    other = {**STEPS, 1: ("[('loss', 0.5)]", "[('loss', 0.6)]")}
    assert "step 1" in judge(SOUND, replace(SOUND, steps=other), mistake=None).detail


def test_a_step_that_is_missing_or_too_many_is_different() -> None:
    assert judge(SOUND, replace(SOUND, steps={0: STEPS[0]}), mistake=None).kind == "DIFFERENT"
    assert judge(SOUND, replace(SOUND, steps={**STEPS, 2: STEPS[0]}), mistake=None).kind == "DIFFERENT"


def test_a_file_that_was_not_written_is_different() -> None:
    assert "final.pt has not been written" in judge(SOUND, replace(SOUND, files={}), mistake=None).detail


def test_no_worker_at_the_end_is_different() -> None:
    assert judge(SOUND, replace(SOUND, finals={}), mistake=None).kind == "DIFFERENT"


def test_a_violation_of_the_history_is_different() -> None:
    assert judge(SOUND, replace(SOUND, violations=("P3: ...",)), mistake=None).kind == "DIFFERENT"


def test_a_difference_that_a_warning_named_is_not_silent() -> None:
    other = replace(SOUND, finals={"w0": "bb"}, warnings=("craft WARNING: job.world_size was read",))
    assert judge(SOUND, other, mistake="mean_over_world", says="world").kind == "warned"
    assert judge(SOUND, other, mistake="own_counter", says="count").kind == "DIFFERENT"
    assert judge(SOUND, other, mistake=None).kind == "DIFFERENT"


def test_a_refusal_needs_a_mistake_and_a_sentence_that_names_it() -> None:
    refused = Outcome(exit_code=1, errors=REFUSED)
    assert judge(SOUND, refused, mistake="optimizer_not_registered", says="register").kind == "refused"
    assert judge(SOUND, refused, mistake=None).kind == "REFUSED"
    assert judge(SOUND, refused, mistake="own_generator", says="generator").kind == "CRASH"
    assert judge(SOUND, Outcome(exit_code=1, errors="SystemExit: 1"), mistake="raises", says="").kind == "CRASH"


def test_a_hang_and_another_exit_code_are_findings() -> None:
    assert judge(SOUND, Outcome(exit_code=-1, hung=True), mistake="own_counter").kind == "HANG"
    assert judge(SOUND, Outcome(exit_code=-11, errors="Segmentation fault"), mistake="own_counter").kind == "CRASH"
    lost = "craft: ended with exit code 3: no worker is left, and there is no checkpoint to begin again from"
    assert judge(SOUND, Outcome(exit_code=3, errors=lost), mistake=None).kind == "given up"


def test_a_planted_silent_difference_is_found(tmp_path: Path) -> None:
    """A script that draws from the process's own identity ends differently each time, and no worker sees it."""
    text = generate(0, without=["mistake", "checkpoints", "stop"], given={"loop": "steps", "optimizer": "sgd"}).text
    text = text.replace('print("FINAL", fingerprint(', 'print("FINAL", fingerprint(os.getpid(), ')
    script = Script(seed=0, features={}, text=text, files=())
    with Driver(tmp_path) as driver:
        result = driver.run(script, Plan(workers=1))
    assert result.verdict.kind == "DIFFERENT", result
    assert "ends with" in result.verdict.detail
    assert "python -m tests.fuzz --seed 0" in str(result)
