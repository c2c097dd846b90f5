from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from craft.telemetry.text.plain_text import indented, one_line

CHARACTERS = st.characters(blacklist_categories=())
HARMLESS = "\t"


@given(st.text(CHARACTERS))
def test_of_any_text_one_line_is_left_without_control_characters(text: str) -> None:
    line = one_line(text)
    assert line.splitlines() in ([], [line])
    line.encode()
    assert not any(ord(each) < 32 or 0x7F <= ord(each) < 0xA0 for each in line if each not in HARMLESS)


@given(st.text(CHARACTERS))
def test_no_line_but_the_first_begins_like_one_of_ours(text: str) -> None:
    first, *rest = indented(text).split("\n")
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in first


def test_what_is_taken_out_can_still_be_read() -> None:
    assert one_line("a\x1b[31mb\nc\x9bd\u202ee\ud800") == r"a\x1b[31mb\nc\x9bd\u202ee\ud800"
    assert one_line("plain \u20ac \u4e2d\ttext") == "plain \u20ac \u4e2d\ttext"
