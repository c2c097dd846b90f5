"""``craft plan``: what it prints, what it takes from a run, what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from craft.cli.main import main
from craft.decide.step.interval import parse_every
from craft.plan.tables import lasts


def craft(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, args)], prog_name="craft")


def planned(*args: str | Path) -> dict[str, Any]:
    done = craft(*args, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def write_run(path: Path, step_s: float = 0.5, faults: int = 2) -> Path:
    """The files of a run of 4 workers with 8 microbatches that lost one ``faults`` times, after every 100 steps."""
    (path / "workers" / "w0").mkdir(parents=True)
    steps: list[dict[str, Any]] = []
    journal: list[dict[str, Any]] = []
    started = {"pid": 1, "url": "http://here", "generation": 0, "slots": 4}
    journal.append({"time": 0.0, "kind": "event", "event": "LighthouseStarted", **started})
    time = 1000.0
    for step in range(100 * (faults + 1)):
        generation = 1 + step // 100
        if step % 100 == 0 and step:
            seen = {"worker_id": f"w{generation}", "seen": time + 0.1, "time": time + 0.1}
            journal += [
                {"kind": "event", "event": "WorkerLost", **seen, "reason": "killed"},
                {
                    "kind": "action",
                    "action": "Reconfigure",
                    "generation": generation,
                    "members": ["w0"],
                    "reason": "w1 lost",
                    "time": time + 0.1,
                },
                {
                    "kind": "outcome",
                    "outcome": "Fault",
                    "worker_ids": [f"w{generation}"],
                    "reason": "killed",
                    "generation": generation - 1,
                    "time": time + 0.1,
                },
            ]
            time += 0.25
        time += step_s
        plan = dict.fromkeys(range(8), "w0")
        line = {"step": step, "branch": 0, "time": time, "generation": generation, "world_size": 4, "plan": plan}
        steps.append(line | {"microbatches": [0, 1]})
    written = {"name": "0000-000000000008-x", "branch": 0, "step": 8, "url": "store", "seconds": 3.0}
    journal += [
        {"time": time, "kind": "event", "event": "CheckpointWritten", **written},
        {"time": time, "kind": "event", "event": "IntervalChosen", "interval_s": 9.0, "reason": "", "cost_s": 0.125},
    ]
    (path / "workers" / "w0" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))
    return path


def test_it_prints_a_table_bars_advice_and_what_it_is_made_from() -> None:
    done = craft("--gpus", "256", "--failures-per-day", "3", "--step", "12 s", "--every", "30 min")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert " ".join(lines[0].split()) == "technique goodput checkpoint every lost in a week saved in a week samples"
    names = [line.split()[0] for line in lines[1:10]]
    assert names == [
        "restart", "restart-best", "restart-craft", "torchft", "shrink", "wait", "wait-spares", "redo", "redo-spares",
    ]  # fmt: skip
    assert "30 min (150 steps)" in lines[1]
    assert any("█" in line and line.startswith("restart ") for line in lines)
    assert any(line.startswith("  craft run --on-loss redo") and "--checkpoint-every '" in line for line in lines)
    assert any(line.split()[:3] == ["failures", "3", "a"] and line.endswith("flag") for line in lines)
    assert any("restart " in line and line.endswith("assumed") for line in lines)


def test_on_a_terminal_the_table_has_the_same_cells() -> None:
    plain = craft("--gpus", "64").output.splitlines()[1].split()
    outer, inner = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "craft.cli.main", "plan", "--gpus", "64"],
        stdout=inner,
        env=os.environ | {"COLUMNS": "120"},
    )
    os.close(inner)
    shown = b""
    try:
        while more := os.read(outer, 65536):
            shown += more
    except OSError:
        pass  # The child has closed its end.
    assert child.wait() == 0
    os.close(outer)
    assert plain in [line.split() for line in shown.decode().splitlines()]


def test_the_interval_that_it_advises_is_one_that_a_run_takes() -> None:
    for checkpoint in ("0 s", "1 s", "40 s", "20 min"):
        advice = planned("--checkpoint", checkpoint)["advice"]
        every = advice["command"].split("--checkpoint-every '")[1].split("'")[0]
        # Within what is left out by printing few digits.
        assert parse_every(every).seconds == pytest.approx(max(1.0, advice["interval_s"]), rel=0.05)


def test_figures_of_a_run_are_taken_unless_they_are_given(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    found = planned("--dir", run)
    taken = found["inputs"]
    assert (taken["gpus"], taken["microbatches"], taken["lost_gpus"]) == (4, 8, 1)
    assert taken["step_s"] == pytest.approx(0.5) and taken["pause_s"] == pytest.approx(0.25)
    assert (taken["checkpoint_s"], taken["stall_s"]) == (3.0, 0.125)
    # 299 times from commit to commit, two of them longer.
    assert found["failures_per_day"] == pytest.approx(86400 * 2 / (299 * 0.5 + 2 * 0.25))
    assert found["origins"]["step_s"] == f"measured in {run}" and found["origins"]["price"] == "assumed"
    given = planned("--dir", run, "--step", "2 s", "--gpus", "40", "--gpus-per-host", "4")
    assert given["inputs"]["step_s"] == 2.0 and given["origins"]["step_s"] == "flag"
    assert given["failures_per_day"] == pytest.approx(10 * found["failures_per_day"])


def test_what_a_run_does_not_show_is_said(tmp_path: Path) -> None:
    output = craft("--dir", write_run(tmp_path / "run", faults=0)).output
    assert "the run shows no failures in 49.5 s" in output


def test_a_chart_is_drawn_or_what_is_missing_is_said(tmp_path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        done = craft("--chart", tmp_path / "plan.png")
        assert done.exit_code == 2 and "pip install matplotlib" in done.output
        return
    for name, start in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        assert craft("--chart", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--step", "12"], "a number and a unit"),
        (["--step", "twelve seconds"], "a number and a unit"),
        (["--step", "0 s"], "must be more than 0"),
        (["--step", "-3 s"], "a number and a unit"),
        (["--mtbf-gpu", "1e400 h"], "a number and a unit"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "1001"], "no whole number of 8"),
        (["--gpus", "4", "--gpus-per-host", "8"], "fewer than a host has"),
        (["--failures-per-day", "nan"], "not a finite number"),
        (["--failures-per-day", "-1"], "--failures-per-day"),
        (["--price", "inf"], "not a finite number"),
        (["--weeks", "0"], "--weeks"),
        (["--mtbf-gpu", "1 h", "--failures-per-day", "3"], "give one of them"),
        (["--chart", "plan.gif"], ".png, .svg or .pdf"),
        (["--chart", "nowhere/plan.png"], "there is no directory"),
        (["--dir", "nowhere"], "there is no run directory"),
    ],
)
def test_rubbish_is_refused_with_a_sentence(args: list[str], sentence: str) -> None:
    done = craft(*args)
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split()) and "Traceback" not in done.output


def test_a_directory_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    done = craft("--dir", tmp_path)
    assert done.exit_code == 2 and "has no journal" in done.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0125, "12.5 ms"), (3.4, "3.4 s"), (90, "90 s"), (1800, "30 min"), (9000, "2.5 h")]
)
def test_times_are_said_in_a_unit_of_their_size(seconds: float, text: str) -> None:
    assert lasts(seconds) == text
