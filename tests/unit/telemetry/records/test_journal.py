from __future__ import annotations

from pathlib import Path
from typing import Any

from craft.protocol.events import WorkerLost
from craft.telemetry.records.journal import Journal, read_lines


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    heard: list[dict[str, Any]] = []
    journal = Journal(path, now=lambda: 5.0)
    end = journal.listen(heard.append)
    journal.write("event", WorkerLost(worker_id="w0", reason="gone", time=4.5))
    journal.write("action", {"action": "Stop"}, generation=3)
    end()
    journal.write("event", {"event": "X"})
    journal.close()
    lines = list(read_lines(path))
    assert lines[:2] == heard
    assert (lines[0]["time"], lines[0]["seen"], lines[0]["event"]) == (5.0, 4.5, "WorkerLost")
    assert lines[1] == {"time": 5.0, "kind": "action", "action": "Stop", "generation": 3}


def test_a_torn_line_costs_itself_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"kind":"event"}\n{"kind":"ev')
    assert list(read_lines(path)) == [{"kind": "event"}]
    journal = Journal(path)
    journal.write("event", {"event": "X"})
    journal.close()
    assert [line.get("event") for line in read_lines(path)] == [None, "X"]


def test_a_journal_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "journal.jsonl")) == []
