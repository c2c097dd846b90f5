"""Lines of ``metrics.jsonl``: a damaged one is left out and said, and is never another step's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system_calls import Rule, failing

from craft.telemetry.records import metric_lines
from craft.telemetry.records.metric_lines import decoded, read_metrics

VALUES = {"step": 12, "branch": 1, "time": 3.5, "loss": 0.25, "size": None}
OLD = b'{"step":3,"time":1.0,"loss":0.5}'
DAMAGED = {
    "half": b'{"step": 1, "ti',
    "a list": b"[1, 2]",
    "a number": b"7",
    "no step": b'{"time": 1.0}',
    "a step that is a text": b'{"step": "4", "time": 1.0}',
    "a step below zero": b'{"step": -1}',
    "deep": b"[" * 100_000,
    "not text": b'{"step": 4, "time": "\xff\xfe"}',
    "another step": metric_lines.encode(VALUES).replace(b"12", b"19"),
    "another value": metric_lines.encode(VALUES).replace(b"0.25", b"0.35"),
}


def test_what_is_encoded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(metric_lines.encode(VALUES) + b"\n" + b'{"step": 13, "under w')
    assert list(read_metrics(path)) == [VALUES]


def test_a_line_with_a_flipped_bit_is_never_another_one() -> None:
    line = metric_lines.encode(VALUES)
    for position in range(8 * len(line)):
        changed = bytearray(line)
        changed[position // 8] ^= 1 << position % 8
        assert list(decoded([line, bytes(changed)]))[1] in (None, VALUES)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_left_out_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    good = metric_lines.encode(VALUES)
    path.write_bytes(b"\n".join([OLD, good, DAMAGED[name], DAMAGED[name], good, b""]))
    assert [values["step"] for values in read_metrics(path)] == [3, 12, 12]
    (said,) = (each.getMessage() for each in caplog.records)
    assert said == f"{path}: 2 lines are damaged and left out"


def test_a_file_that_cannot_be_read_is_said_and_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(metric_lines.encode(VALUES) + b"\n")
    with failing(tmp_path / "switch", Rule("read", "EIO", path=str(path))):
        assert list(read_metrics(path)) == []
    assert "cannot be read to its end: Input/output error" in caplog.text
