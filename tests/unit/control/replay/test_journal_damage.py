"""The journal is a log: whatever is in it, a lighthouse starts, says what it could not read, and knows what the job needs."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from craft.control.lighthouse import Lighthouse, LighthouseSettings
from craft.control.replay.event_stream import EventStream
from craft.control.replay.journal_replay import JournalReplay
from craft.control.replay.timings import Timings
from craft.protocol.events import AlertFired, TimesMeasured
from craft.settings.rundir import RunDir
from craft.telemetry.explain.sentences import detail
from craft.telemetry.history import read_run
from craft.telemetry.records.journal import Journal, parsed, read_lines
from craft.telemetry.records.journal_reader import as_record, read_journal

OLD = Path(__file__).parents[3] / "fixtures/old/2026-11-16"
DAMAGED = {
    "not_json": b'{"time":5.0,"kind":"ev',
    "not_an_object": b"[1, 2]",
    "a_number": b"17",
    "not_text": b'{"time":5.0,"kind":"event","event":"W\xff"}',
    "no_kind": b'{"time":5.0,"kinf":"event","event":"WorkerLost","worker_id":"w0","reason":"x"}',
    "no_time": b'{"tyme":5.0,"kind":"event","event":"WorkerLost","worker_id":"w0","reason":"x"}',
    "no_field": b'{"time":5.0,"kind":"event","event":"CheckpointWritten","name":"x","branch":0,"url":"y"}',
    "other_type": b'{"time":5.0,"kind":"outcome","outcome":"Fault","worker_ids":7,"reason":"x","generation":1}',
    "no_generation": b'{"time":5.0,"kind":"action","action":"Reconfigure","members":["w0"],"reason":"x"}',
}


@pytest.fixture
def journal(tmp_path: Path) -> bytes:
    """One line of every kind that a job of two workers writes, and two more."""
    own = Journal(tmp_path / "journal.jsonl", now=lambda: 1794851887.25)
    own.write("event", AlertFired(source="am", name="hot", fingerprint="f0", reason="hot", labels={"a": "b"}))
    own.write("event", TimesMeasured(step=4, total_steps=16, microbatches=4, step_s=((2, 0.5),)))
    own.close()
    files = [tmp_path / "journal.jsonl", OLD / "cut/run/journal.jsonl", OLD / "finished/run/journal.jsonl"]
    lines = [line for file in files for line in file.read_bytes().splitlines(keepends=True)]
    by_name = {str(found.get(found["kind"])): line for line in lines for found in parsed([line])}
    (tmp_path / "journal.jsonl").unlink()
    return b"".join(by_name.values())


def flips(data: bytes, every: int = 1) -> Iterator[bytes]:
    for number in range(0, 8 * len(data), every):
        changed = bytearray(data)
        changed[number // 8] ^= 1 << number % 8
        yield bytes(changed)


def started(folder: Path) -> Lighthouse:
    """A lighthouse that began on a run directory."""

    async def begin() -> Lighthouse:
        lighthouse = Lighthouse(RunDir(folder), LighthouseSettings(workers=2), "http://here")
        lighthouse.journal.close()
        return lighthouse

    return asyncio.run(begin())


def damage_in(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(RunDir(folder).journal) if line.get("event") == "FileDamaged"]


def replay(data: bytes) -> None:
    """All that a lighthouse and the commands make of a journal."""
    lines = [record for line in parsed(data.splitlines()) if (record := as_record(line)) is not None]
    Timings(JournalReplay(lines).times)
    for line in lines:
        detail(line)


def test_a_journal_with_any_flipped_bit_is_replayed(journal: bytes) -> None:
    lines = journal.splitlines(keepends=True)
    assert len(lines) > 12 and all(map(as_record, parsed(lines)))
    # Line by line, each with the next one: a flipped line end makes one of two.
    for line, following in itertools.pairwise([*lines, b""]):
        for data in flips(line):
            replay(data + following)


def test_a_lighthouse_starts_with_a_flipped_journal(tmp_path: Path, journal: bytes) -> None:
    run = RunDir(tmp_path).create()
    for data in flips(journal, 997):
        run.journal.write_bytes(data)
        started(tmp_path)
        assert list(read_journal(run.journal))[-1]["event"] in ("LighthouseStarted", "FileDamaged")


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_set_aside_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    run = RunDir(tmp_path).create()
    own = Journal(run.journal)
    own.write("event", {"event": "X", "number": 1})
    own.close()
    before = run.journal.stat().st_size
    with run.journal.open("ab") as file:
        file.write(DAMAGED[name] + b"\n")
    after = run.journal.stat().st_size
    started(tmp_path)
    (told,) = damage_in(tmp_path)
    assert told["file"] == "journal.jsonl" and "set aside in journal.jsonl.damaged" in told["detail"]
    assert "1 line is not readable" in caplog.text
    assert (tmp_path / "journal.jsonl.damaged").read_bytes() == DAMAGED[name] + b"\n"
    data = run.journal.read_bytes()
    assert data[before:after] == b" " * len(DAMAGED[name]) + b"\n", "all other lines stay where they were"
    started(tmp_path)
    assert len(damage_in(tmp_path)) == 1, "it is said once"


def test_damaged_lines_keep_their_numbers_and_are_not_sent_P6(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    own = Journal(path)
    own.write("event", {"event": "X"})
    path.write_bytes(path.read_bytes() + b"\n".join(DAMAGED.values()) + b"\n")
    own.write("event", {"event": "Y"})

    async def sent() -> list[bytes]:
        return [each async for each in EventStream(own, path).stream(follow=False)]

    first, second = asyncio.run(sent())
    own.close()
    assert first.startswith(b"id: 1\n") and second.startswith(b"id: %d\n" % (2 + len(DAMAGED)))


def test_what_the_job_needs_is_not_in_the_journal_alone(tmp_path: Path) -> None:
    """Its newest checkpoint decides where it begins again when every worker is lost."""
    shutil.copytree(OLD / "cut/run", tmp_path / "run")
    run = RunDir(tmp_path / "run")
    old = started(run.path).loop.state
    assert old.checkpoint is not None and old.checkpoint.step == 12, "an earlier version had it in the journal alone"

    async def note() -> None:
        lighthouse = Lighthouse(run, LighthouseSettings(workers=2), "http://here")
        assert old.checkpoint is not None
        lighthouse.loop.handle(type(old.checkpoint)(name="0002-000000000014-x", branch=2, step=14, url="store"))
        lighthouse.journal.close()

    asyncio.run(note())
    run.journal.write_bytes(b"")
    state = started(run.path).loop.state
    assert state.checkpoint is not None
    assert (state.checkpoint.step, state.branch) == (14, 2)


def test_files_of_workers_with_damaged_lines_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(OLD / "cut/run", tmp_path / "run")
    steps = tmp_path / "run/workers/w0/steps.jsonl"
    whole = len(read_run(tmp_path / "run").commits["w0"])
    steps.write_bytes(steps.read_bytes().replace(b'"step":3', b'"sted":3'))
    with (tmp_path / "run/journal.jsonl").open("ab") as file:
        file.write(json.dumps({"kind": "event"}).encode() + b"\n")
    run = read_run(tmp_path / "run")
    assert len(run.commits["w0"]) == whole - 1
    assert "steps.jsonl: a line is damaged and left out" in caplog.text
    assert "journal.jsonl: 1 line is damaged and left out" in caplog.text
