from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from craft.control.replay.checkpoints import CheckpointBook
from craft.control.replay.journal_replay import JournalReplay
from craft.protocol.events import (
    AnyNote,
    CheckpointAbandoned,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointSkipped,
    CheckpointWritten,
    ConditionSeen,
    IntervalChosen,
    NumbersDiverged,
    RolledBack,
)
from craft.telemetry.records.journal import Journal, read_lines


def written(step: int, **more: object) -> CheckpointWritten:
    fields = {"name": f"c{step}", "branch": 0, "step": step, "url": "store", "total_bytes": 100, "new_bytes": 10}
    return msgspec.convert(fields | {"seconds": 0.5} | more, CheckpointWritten)


NOTES: tuple[AnyNote, ...] = (
    CheckpointRejected(name="c8", step=8, url="store", reason="a chunk is torn"),
    CheckpointRestored(name="c4", branch=0, step=4, url="store"),
    written(10),
    CheckpointFailed(worker_id="w1", name="c20", step=20, error="disk full", tries=1, retry_s=0.5),
    CheckpointAbandoned(name="c20", step=20, reason="w1 was lost"),
    CheckpointSkipped(step=30, reason="the one before it is still being written"),
    written(40, tag="best"),
    IntervalChosen(interval_s=12.5, reason="it costs little"),
    NumbersDiverged(step=41, what="the loss", answer="the step is left out"),
    RolledBack(branch=1, step=40, left_at=41, skipped=1, reason="the loss"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def journal_of(path: Path, book: CheckpointBook) -> Journal:
    journal = Journal(path, now=lambda: 5000.0)
    journal.listen(book)
    return journal


def test_what_workers_tell_is_counted_as_it_is_written(path: Path) -> None:
    book = CheckpointBook()
    journal = journal_of(path, book)
    for note in NOTES:
        journal.write("event", note)
    journal.write("event", {"event": "LighthouseHeard", "host": "a"})
    journal.close()
    status = book.status
    assert status.last is not None
    assert (status.last.step, status.last.tag, status.last.time, status.last.seconds) == (40, "best", 5000.0, 0.5)
    assert (status.written, status.total_bytes, status.new_bytes) == (2, 200, 20)
    assert (status.failures, status.failure) == (1, "w1: disk full")
    assert (status.skipped, status.abandoned, status.rejected, status.restored) == (1, 1, 1, "c4")
    assert (status.interval_s, status.reason) == (12.5, "it costs little")


def test_a_restarted_lighthouse_knows_what_was_told_before(path: Path) -> None:
    first = CheckpointBook()
    journal = journal_of(path, first)
    for note in NOTES:
        journal.write("event", note)
    journal.close()
    second = JournalReplay(read_lines(path)).checkpoints
    assert second.status == first.status
    assert second.newest == written(40, tag="best")
    assert all(note in JournalReplay(read_lines(path)).journaled for note in NOTES)
    assert written(41) not in JournalReplay(read_lines(path)).journaled


def test_a_restarted_lighthouse_knows_a_condition_by_the_time_that_its_worker_gave_it(path: Path) -> None:
    told = ConditionSeen(technique="thermal", what="heat", worker_id="w1", host="a", value=95.0, detail="", time=123.5)
    journal = journal_of(path, CheckpointBook())
    journal.write("event", told)
    journal.close()
    assert told in JournalReplay(read_lines(path)).journaled
    assert replace(told, time=124.5) not in JournalReplay(read_lines(path)).journaled
