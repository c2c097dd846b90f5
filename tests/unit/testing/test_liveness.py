"""A pause that no line of the journal justifies is found, and one that a line justifies is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from craft.testing.liveness import LivenessReport, check, judge

from .runs import Files, write_lines

Line = dict[str, Any]


def event(moment: float, name: str, **fields: Any) -> Line:
    return {"time": moment, "kind": "event", "event": name, **fields}


def action(moment: float, name: str, **fields: Any) -> Line:
    return {"time": moment, "kind": "action", "action": name, "reason": "because", **fields}


def injected(moment: float, kind: str, **fields: Any) -> Line:
    return event(moment, "FaultInjected", fault=kind, **fields)


STARTED = event(0.0, "LighthouseStarted", pid=1, restarted=False)


def paused(*lines: Line, begin: float = 10.0, end: float = 30.0, **options: Any) -> LivenessReport:
    """Judge a job that commits step 0 at ``begin``, step 1 at ``end``, and ends well."""
    journal = [STARTED, *lines, action(end + 1, "Stop", exit_code=0)]
    return judge(journal, [(begin, 0), (end, 1)], **options)


def overdue(moment: float, elapsed_s: float, limit_s: float, phase: str = "computing") -> Line:
    return event(
        moment, "WorkerOverdue", worker_id="w1", phase=phase, elapsed_s=elapsed_s, limit_s=limit_s, detail="hangs"
    )


def broken(moment: float, *unreachable: str) -> Line:
    return event(moment, "ExchangeBroken", worker_id="w1", generation=1, unreachable=list(unreachable))


def died(moment: float, reason: str) -> Line:
    return event(moment, "WorkerLost", worker_id="w1", source="agent", reason=reason)


def test_a_planted_pause_is_found_with_the_lines_around_it() -> None:
    report = paused(died(12.0, "killed by SIGKILL"))
    (violation,) = report.violations
    first, _, *lines = violation.split("\n")
    assert first == (
        "no step was committed for 20.0 s after step 0, 20.0 s of it (more than 5 s) for no reason that the journal gives;"
        " it says: the journal gives no reason"
    )
    assert any("+2.00 WorkerLost worker_id=w1 source=agent reason=killed by SIGKILL" in line for line in lines), lines
    assert [pause.length_s for pause in report.pauses] == [20.0]


def test_a_pause_of_the_limit_needs_no_reason() -> None:
    report = paused(end=15.0)
    assert report.violations == () and report.pauses == ()
    assert report.longest is not None and report.longest.length_s == 5.0
    assert paused(end=15.0, limit_s=4.0).violations != ()


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([overdue(28.0, 17.5, 17.0)], id="a hang limit had to run out"),
        pytest.param([overdue(27.0, 16.5, 16.0, "exchanging"), broken(28.0, "w2")], id="a link that carries nothing"),
        pytest.param([event(28.0, "HostLost", host="a", reason="silent for 17.0 s")], id="the silence of a host"),
        pytest.param([action(11.0, "Hold", generation=1, limit_s=60.0), action(29.0, "Reconfigure")], id="a hold"),
        pytest.param(
            [action(11.0, "Restore", limit_s=60.0), event(28.0, "WorkerJoined"), action(28.1, "Reconfigure")],
            id="a restore whose workers come",
        ),
        pytest.param(
            [
                action(11.0, "Await", worker_id="w1", host=None, limit_s=None),
                event(29.0, "Answered", worker_id="w1", host=None),
            ],
            id="the holder of the last copy is silent",
        ),
        pytest.param(
            [event(13.0, "LighthouseAlone", silent_s=3.0), event(29.0, "LighthouseHeard", host="a")],
            id="no host is heard",
        ),
        pytest.param([event(11.0, "LoopEnded"), event(29.0, "LoopBegun")], id="between two loops"),
        pytest.param([event(29.0, "WorkerPaused", worker_id="w1", reason="evaluation", seconds=18.0)], id="job.paused"),
        pytest.param(
            [injected(13.0, "kill"), injected(17.0, "kill"), injected(21.0, "cut"), injected(25.5, "kill-all")],
            id="further faults",
        ),
    ],
)
def test_what_the_journal_says_was_waited_for_justifies_a_pause(lines: list[Line]) -> None:
    report = paused(*lines)
    assert report.violations == ()
    assert len(report.pauses) == 1
    assert paused(*lines, end=45.0).violations != (), "and no more of it than it took"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([overdue(28.0, 17.5, 2.0)], id="a hang that was seen long after its limit"),
        pytest.param([overdue(27.0, 16.5, 16.0, "exchanging"), broken(28.0)], id="all wait for one another"),
        pytest.param([action(11.0, "Hold", generation=1, limit_s=3.0)], id="a hold beyond its limit"),
        pytest.param(
            [action(11.0, "Restore", limit_s=60.0), event(13.0, "WorkerJoined"), action(28.0, "Reconfigure")],
            id="a restore that goes on waiting when all have come",
        ),
        pytest.param(
            [action(11.0, "Restore", limit_s=60.0), event(28.0, "HoldExpired"), action(28.0, "Reconfigure")],
            id="a restore for which nobody comes",
        ),
        pytest.param([injected(11.0, "kill-lighthouse")], id="a lighthouse that does not come back"),
        pytest.param(
            [injected(15.0, "slow"), injected(20.0, "slow"), injected(25.0, "slow")], id="who is slow gets on"
        ),
        pytest.param([injected(15.0, "drain"), injected(20.0, "hang"), injected(25.0, "end-host")], id="no killing"),
        pytest.param([died(12.0, "was there for 17.0 s")], id="a death"),
        pytest.param([died(15.0 + each, "exit code 1") for each in range(9)], id="deaths that nobody caused"),
    ],
)
def test_what_does_not_explain_the_length_of_a_pause_does_not_justify_it(lines: list[Line]) -> None:
    assert len(paused(*lines).violations) == 1


def test_waits_that_overlap_count_once() -> None:
    assert paused(overdue(20.0, 7.0, 7.0), overdue(21.0, 7.0, 7.0)).violations != ()


def test_a_first_step_takes_as_long_as_the_caller_says() -> None:
    entered = event(11.0, "GenerationEntered", worker_id="w1", generation=2)
    assert paused(entered).violations != ()
    assert paused(entered, first_step_s=20.0).violations == ()
    again = event(11.0, "GenerationEntered", worker_id="w1", generation=3)
    assert paused({**entered, "time": 5.0}, again, first_step_s=5.0).violations != (), "it is not its first"


def test_a_job_that_does_not_go_on_after_its_last_fault_is_found() -> None:
    lost = {"time": 12.0, "kind": "outcome", "outcome": "Fault", "worker_ids": ["w1"], "reason": "killed"}
    (violation,) = judge([STARTED, lost], [(10.0, 0), (11.0, 1)]).violations
    assert violation.startswith("after the last fault the job committed nothing, and did not end")
    assert judge([STARTED, lost], [(10.0, 0), (11.0, 1), (13.0, 2)]).violations == ()


def test_an_end_is_as_good_as_progress_if_it_comes_soon_and_with_the_right_code() -> None:
    lost = {"time": 12.0, "kind": "outcome", "outcome": "Fault", "worker_ids": ["w1"], "reason": "killed"}

    def ended(moment: float, **options: Any) -> tuple[str, ...]:
        return judge([STARTED, lost, action(moment, "Stop", exit_code=3)], [(11.0, 1)], **options).violations

    assert ended(13.0) == ended(13.0, exit_code=3) == ()
    (late,) = ended(29.0)
    assert late.startswith("no step was committed for 18.0 s after step 1")
    (wrong,) = ended(13.0, exit_code=0)
    assert wrong.startswith("the job ended with exit code 3 (because); expected exit code 0")


def test_what_a_script_does_after_its_last_step_is_no_pause() -> None:
    journal = [STARTED, event(11.0, "LoopEnded", worker_id="w0"), action(90.0, "Stop", exit_code=0)]
    assert judge(journal, [(9.0, 0), (10.0, 1)], exit_code=0).violations == ()


def test_the_files_of_a_run_are_read_with_those_of_its_hosts_and_further_journals(files: Files, tmp_path: Path) -> None:
    for number, line in enumerate(files.journal):
        line["time"] = float(number)
    for step, moment in ((2, 12.0), (3, 13.0)):
        files.steps["w0"][step]["time"] = moment
    files.journal.append(action(14.0, "Stop", exit_code=0))
    run_dir = files.write()
    assert len(check(run_dir).violations) == 1, "step 2 came 11 s after step 1"
    outside = tmp_path / "outside.jsonl"
    write_lines(outside, [injected(6.0, "kill-all", injection_id="1"), injected(9.0, "kill-all", injection_id="2")])
    assert check(run_dir, journals=[outside]).violations == ()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "craft.testing.liveness", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    live = run(str(run_dir), "--journal", str(outside), "--exit-code", "0")
    assert live.returncode == 0 and live.stdout.startswith("the job was live: 1 pauses were longer than 5 s"), live
    stood = run(str(run_dir))
    assert stood.returncode == 1 and stood.stdout.startswith("no step was committed for 11.0 s after step 1"), stood
    assert run(str(tmp_path / "nowhere")).returncode == 2
    assert json.loads(outside.read_text().splitlines()[0])["fault"] == "kill-all"
