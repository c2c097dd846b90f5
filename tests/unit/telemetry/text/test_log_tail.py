"""What is shown of a worker's log: every line once, bounded, and nothing that could change the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.telemetry.text.log_tail import BAR_S, MAX_LINE_BYTES, MAX_NEW_BYTES, PARTIAL_S, LogTail, ScriptLines
from craft.telemetry.text.plain_text import output_line


class Log:
    """A log that grows, and who follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail = LogTail(path, 0, "workers/w0/log")
        self.now = 0.0

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def read(self, data: bytes = b"", *, after_s: float = 0.1, final: bool = False) -> list[bytes]:
        self.write(data)
        self.now += after_s
        return self.tail.read(self.now, final=final)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def test_lines_come_whole_however_they_were_written(log: Log) -> None:
    assert log.read(b"one\ntw") == [b"one"]
    assert log.read(b"o\n\nthree\n") == [b"two", b"", b"three"]
    assert log.read() == []


def test_a_log_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    assert LogTail(tmp_path / "nothing").read(0.0) == []


def test_a_line_without_an_end_is_shown_after_a_while_and_its_rest_later(log: Log) -> None:
    assert log.read(b"loading ... ") == []
    assert log.read(after_s=PARTIAL_S) == [b"loading ... "]
    assert log.read(b"done\n") == [b"done"]
    assert log.read(b"again ... ") + log.read(after_s=PARTIAL_S) == [b"again ... "]
    assert log.read(b"\nnext\n") == [b"next"]


def test_a_character_is_not_torn_in_an_unfinished_line(log: Log) -> None:
    euro = "€".encode()
    assert log.read(b"5 " + euro[:2]) == []
    assert log.read(after_s=PARTIAL_S) == [b"5 "]
    assert log.read(euro[2:] + b"\n") == [euro]


def test_the_last_line_needs_no_end_when_the_worker_has_ended(log: Log) -> None:
    assert log.read(b"last words", final=True) == [b"last words"]


def test_of_a_progress_bar_only_its_newest_state_is_shown_now_and_then(log: Log) -> None:
    shown = [line for percent in range(100) for line in log.read(b"\r%d%%" % percent, after_s=0.25)]
    assert len(shown) <= 25 / BAR_S + 1
    assert log.read(b"\r100%\n") == [b"100%"]


def test_a_line_that_is_too_long_is_cut(log: Log) -> None:
    (cut,) = log.read(b"x" * (MAX_LINE_BYTES + 1))
    assert cut.startswith(b"xxx") and cut.endswith(b" ... (the line goes on in workers/w0/log)")
    assert log.read(b"x" * 100 + b"\nnext\n") == [b"next"]
    (cut, after) = log.read(b"y" * (MAX_LINE_BYTES + 1) + b"\nnext\n")
    assert len(cut) < MAX_LINE_BYTES + 100 and after == b"next"


def test_one_line_of_ten_megabytes_is_left_out_and_said_once(log: Log) -> None:
    shown = [line for _ in range(5) for line in log.read(b"z" * 2_000_000)]
    assert shown == [b"... 1 line left out, see workers/w0/log"]
    assert log.read(b"\nnext\n") == [b"next"]


def test_too_many_lines_are_left_out_and_counted_and_the_newest_are_shown(log: Log) -> None:
    number = 3 * MAX_NEW_BYTES // 10
    shown = log.read(b"".join(b"%09d\n" % each for each in range(number)))
    sentence, newest = shown[0].decode(), [int(line) for line in shown[1:]]
    assert newest == list(range(newest[0], number))
    assert sentence == f"... {newest[0]} lines left out, see workers/w0/log"


@given(st.lists(st.binary(max_size=40), max_size=20), st.binary(max_size=20))
def test_nothing_is_lost_or_repeated_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], end: bytes
) -> None:
    pieces = [piece.replace(b"\r", b"") for piece in (*pieces, end)]
    log = Log(tmp_path_factory.mktemp("tail") / "log")
    shown = [line for piece in pieces for line in log.read(piece)]
    shown += log.read(final=True)
    expected = b"".join(pieces).split(b"\n")
    assert shown == [*expected[:-1], *([expected[-1]] if expected[-1].strip() else [])]


@pytest.mark.parametrize(
    ("line", "plain", "coloured"),
    [
        (b"plain \xe2\x82\xac", "plain €", "plain €"),
        (b"\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m\x1b[0m"),
        (b"\x1b[2J\x1b[1;1Hgone\x1b[?25l", "gone", "gone"),
        (b"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link", "textlink", "textlink"),
        (b"bell\x07 back\x08 null\x00 tab\t.", "bell back null tab\t.", "bell back null tab\t."),
        (b"\xff\xfe", "��", "��"),
        ("\x9b2J".encode(), "2J", "2J"),
        (b"\x1b", "", ""),
    ],
)
def test_no_line_can_change_the_terminal(line: bytes, plain: str, coloured: str) -> None:
    assert output_line(line, colours=False) == plain
    assert output_line(line, colours=True) == coloured


@given(st.binary())
def test_of_any_bytes_nothing_is_left_that_is_not_text_or_a_colour(line: bytes) -> None:
    assert all(
        each.isprintable() or each in "\t\xa0" or not each.isascii() for each in output_line(line, colours=False)
    )


OWN = "2026-11-16 14:30:45,123 craft.worker.membership.client"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("step 3 loss 0.5", "step 3 loss 0.5"),
        (f"{OWN} INFO generation 2 is open", None),
        (f"{OWN} WARNING checkpoint 3 cannot be used", "craft warning: checkpoint 3 cannot be used"),
        (f"{OWN} ERROR gone", "craft error: gone"),
        (f"10%|#   {OWN} INFO generation 2 is open", "10%|#   "),
        ("[2026-11-16 14:30:45,123][craft.worker.membership.client][INFO] - as hydra has it", None),
        ("2026-11-16 14:30:45,123 my.script INFO mine", "2026-11-16 14:30:45,123 my.script INFO mine"),
        ("2026-11-16 14:30:45,123 craftsman INFO mine", "2026-11-16 14:30:45,123 craftsman INFO mine"),
        ("[W1116 14:30:45.1 TCPStore.cpp:106] [c10d] recvVector failed", None),
        ("frame #3: c10d::Store::get + 0x1f (0x7f in libtorch.so)", None),
    ],
)
def test_what_the_script_did_not_write_is_not_shown(line: str, shown: str | None) -> None:
    assert ScriptLines().shown(line) == shown


def test_the_stacks_of_a_hang_are_not_shown() -> None:
    lines = ["before", "--- 2026-11-16 14:30:45 craft: w0 hangs: computing", "Thread 1", "--- end of stacks", "after"]
    log = ScriptLines()
    assert [line for line in lines if log.shown(line) is not None] == ["before", "after"]
