"""Files of lines on a disk that is full for a while: nobody fails, and in the end nothing is missing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.small_disk import fill, mounted

from craft.telemetry.records.journal import Journal, Tail, read_lines
from craft.telemetry.records.jsonl_file import MAX_WAITING, JsonlFile


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "512k") as place:
        yield place


def line(number: int) -> bytes:
    # No divisor of a page: a disk that gets full takes a part of a line.
    return json.dumps({"number": number, "text": "x" * 777}).encode()


def numbers(path: Path) -> list[int]:
    return [found["number"] for found in read_lines(path)]


def test_lines_wait_while_a_disk_is_full(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = disk / "record.jsonl"
    record = JsonlFile(path)
    record.add(line(0))
    filler = fill(disk)
    for number in range(1, 20):
        record.add(line(number))
    assert record.trouble == f"{path} cannot be written: No space left on device"
    assert numbers(path) == [0, 1, 2, 3, 4]
    filler.unlink()
    record.add(line(20))
    assert record.trouble == ""
    assert numbers(path) == list(range(21))
    said = [each.levelno for each in caplog.records]
    assert said == [logging.ERROR, logging.WARNING]


def test_a_record_that_could_not_be_made_is_made_later(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("in the way")
    record = JsonlFile(tmp_path / "folder" / "record.jsonl")
    record.add(line(0))
    assert "cannot be written" in record.trouble
    (tmp_path / "folder").unlink()
    record.add(line(1))
    assert numbers(tmp_path / "folder" / "record.jsonl") == [0, 1]


def test_what_waits_is_bounded(disk: Path) -> None:
    path = disk / "record.jsonl"
    record = JsonlFile(path)
    filler = fill(disk)
    for number in range(MAX_WAITING + 10):
        record.add(b'{"number": %d}' % number)
    filler.unlink()
    record.flush()
    assert numbers(path) == [0, *range(11, MAX_WAITING + 10)]


def test_who_listens_to_a_journal_hears_what_cannot_be_written(disk: Path) -> None:
    journal = Journal(disk / "journal.jsonl")
    heard: list[object] = []
    journal.listen(lambda line: heard.append(line["event"]))
    fill(disk)
    journal.write("event", {"event": "X"})
    journal.close()
    assert heard == ["X"]


def test_a_torn_line_does_not_stop_who_follows_a_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"kind":"event"}\n{"kind":"ev\n{"kind":"action"}\n')
    assert Tail(path).new_lines() == [{"kind": "event"}, {"kind": "action"}]
