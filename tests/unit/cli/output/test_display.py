"""The display prints on a thread that nothing else waits for, and prints all before the summary."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from craft.agent.outcome import JobOutcome
from craft.cli.output.display import Display
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import Journal


def supervisor(*started: str) -> Any:
    """As much of an agent as the display looks at."""
    relay = SimpleNamespace(directive=None, reports=dict, unwritten=lambda: "")
    return SimpleNamespace(relay=relay, pool=SimpleNamespace(started=list(started), ended_ids=frozenset(started)))


def console(file: Any) -> Console:
    return Console(file=file, highlight=False, soft_wrap=True, force_terminal=False)


def run_dir_with(tmp_path: Path, log: bytes) -> RunDir:
    run_dir = RunDir(tmp_path / "run").create()
    run_dir.worker("w0").mkdir()
    run_dir.log("w0").write_bytes(log)
    return run_dir


def test_what_a_worker_wrote_is_printed_and_its_traceback_once(tmp_path: Path) -> None:
    text = io.StringIO()
    story = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: [no] markup'
    display = Display(run_dir_with(tmp_path, f"hello\n{story}\n".encode()), RunSettings(script="x.py"), console(text))
    display.show(supervisor("w0"))
    display.close()
    display.summary(JobOutcome(exit_code=1, reason="ValueError", traceback=story), 1.0)
    printed = text.getvalue()
    assert "[w0] hello\n[w0] Traceback" in printed
    assert printed.count("ValueError: [no] markup") == 1


def test_a_traceback_that_was_not_seen_is_in_the_summary(tmp_path: Path) -> None:
    text = io.StringIO()
    display = Display(run_dir_with(tmp_path, b"hello\n"), RunSettings(script="x.py"), console(text))
    display.show(supervisor("w0"))
    display.close()
    display.summary(JobOutcome(exit_code=1, reason="ValueError", traceback="Traceback\nValueError: 5"), 1.0)
    assert "\n  Traceback\n  ValueError: 5\n" in text.getvalue()


def _read_all(fd: int, into: bytearray) -> None:
    while data := os.read(fd, 1 << 16):
        into += data


def test_a_terminal_that_takes_nothing_does_not_hold_up_the_agent(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        chatter = b"".join(b"a line %d\n" % number for number in range(10_000))
        display = Display(run_dir_with(tmp_path, chatter), RunSettings(script="x.py"), console(file))
        began = time.monotonic()
        for _ in range(50):
            display.show(supervisor("w0"))
            display.say("x" * 10_000)
        assert time.monotonic() - began < 5
        received = bytearray()
        reader = threading.Thread(target=_read_all, args=(reading, received))
        reader.start()
        display.close()
    reader.join()
    os.close(reading)
    # Nothing that the agent said is lost, and the worker's newest lines are there.
    assert received.count(b"x" * 10_000) >= 49 and b"[w0] a line 9999\n" in received


def test_characters_that_the_terminal_does_not_know_are_spelled_out(tmp_path: Path) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    display = Display(run_dir_with(tmp_path, "5 €\n".encode()), RunSettings(script="x.py"), console(cast(Any, file)))
    display.show(supervisor("w0"))
    display.close()
    file.flush()
    assert b"[w0] 5 \\u20ac\n" in raw.getvalue()


FORGED = "gone\ncraft: finished: all is well\x1b[2J\x1b]0;title\x07\r\u202e"


def test_no_text_from_outside_forges_a_line_or_reaches_the_terminal_as_it_came(tmp_path: Path) -> None:
    text = io.StringIO()
    run_dir = run_dir_with(tmp_path, b"hello \x1b[2J\rcraft: finished: all is well\n")
    journal = Journal(run_dir.journal)
    journal.write("event", {"event": "WorkerLost", "worker_id": "w0", "reason": FORGED, "source": "api"})
    journal.write("event", {"event": "HostLost", "host": FORGED, "reason": "silent"})
    journal.close()
    display = Display(run_dir, RunSettings(script="x.py"), console(text))
    display.show(supervisor("w0"))
    display.close()
    display.summary(JobOutcome(exit_code=1, reason=FORGED, traceback=f"Traceback\nValueError: {FORGED}"), 1.0)
    printed = text.getvalue()
    assert printed.count("all is well") == 5
    assert all(each.isprintable() for each in printed.replace("\n", ""))
    assert not [line for line in printed.split("\n") if line.startswith("craft: finished")]
    assert r"w0 lost: gone\ncraft: finished: all is well\x1b[2J\x1b]0;title\x07\r\u202e" in printed


@pytest.mark.parametrize(
    ("exit_code", "ago_s", "wall_s", "said"),
    [
        (0, 4.0, 10.0, "8 steps in 10.0 s, 0 faults, goodput 100.00%\n"),
        (3, 4.0, 10.0, "8 steps in 10.0 s, 0 faults\n"),
        (0, None, 10.0, "0 steps in 10.0 s, 0 faults\n"),
        # The clock was set forward, or back, since the first step.
        (0, 3600.0, 10.0, "0 faults, goodput not known (the clock was set while the job ran)\n"),
        (0, -3600.0, 10.0, "0 faults, goodput not known (the clock was set while the job ran)\n"),
    ],
)
def test_goodput_is_told_where_there_is_something_to_show_for_the_time(
    tmp_path: Path, exit_code: int, ago_s: float | None, wall_s: float, said: str
) -> None:
    run_dir = run_dir_with(tmp_path, b"")
    if ago_s is not None:
        commit = {"step": 7, "branch": 0, "time": time.time() - ago_s, "generation": 1, "world_size": 1}
        run_dir.steps("w0").write_text(json.dumps({**commit, "microbatches": [0], "plan": {"0": "w0"}}) + "\n")
    text = io.StringIO()
    Display(run_dir, RunSettings(script="x.py"), console(text)).summary(
        JobOutcome(exit_code=exit_code, reason="r"), wall_s
    )
    assert said in text.getvalue()
