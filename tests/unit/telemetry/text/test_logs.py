from __future__ import annotations

import logging

import pytest

from craft.telemetry.text.logs import FOR_PEOPLE, IN_FILES, SafeFormatter, hide
from craft.wire.auth import make_token, state_key


def record(
    message: str, *args: object, name: str = "craft.control.http.connection_limits", error: Exception | None = None
) -> logging.LogRecord:
    caught = (type(error), error, None) if error is not None else None
    return logging.LogRecord(name, logging.WARNING, __file__, 1, message, args, caught)


@pytest.mark.parametrize("where", ["argument", "message", "error"])
def test_no_secret_of_the_process_is_in_its_log_P6(where: str) -> None:
    token = make_token()
    key, own = state_key(token), hide("chosen-by-a-person")
    for secret in (token, key, own):
        formatted = SafeFormatter(FOR_PEOPLE).format(
            {
                "argument": record("refused: %s", f"b'X-Other: {secret}x'"),
                "message": record(f"refused {secret}"),
                "error": record("refused", error=ValueError(f"bad line\n b'GET /{secret}'")),
            }[where]
        )
        assert secret not in formatted
        assert "refused" in formatted
        assert "[hidden]" in formatted


@pytest.mark.parametrize("header", ["Authorization: Bearer", "authorization: bearer ", "b'Bearer"])
def test_a_bearer_token_that_is_not_ours_is_not_logged_either(header: str) -> None:
    formatted = SafeFormatter(FOR_PEOPLE).format(record("from a: %s 0123456789abcdef' it ends", header))
    assert "0123456789abcdef" not in formatted
    assert formatted.endswith("' it ends")


def test_what_is_logged_cannot_pass_for_another_line_or_change_the_terminal() -> None:
    forged = "gone\n2026-01-01 00:00:00,000 craft.control.core.loop INFO all is well\x1b[2J\r\u202e"
    for each in (record("%s", forged), record("lost", error=ValueError(forged))):
        first, *rest = SafeFormatter(IN_FILES).format(each).split("\n")
        assert first.endswith(("gone", "lost"))
        assert rest and all(line.startswith("  ") for line in rest)
        assert rest[-1].endswith(r"all is well\x1b[2J\r\u202e")


def test_the_records_of_a_script_are_left_as_they_are() -> None:
    formatter = SafeFormatter("%(message)s", "craft")
    assert formatter.format(record("a\n\x1b[31mb", name="train")) == "a\n\x1b[31mb"
    assert formatter.format(record("a\n\x1b[31mb", name="craftsman")) == "a\n\x1b[31mb"
    assert formatter.format(record("a\n\x1b[31mb", name="craft")) == "a\n  \\x1b[31mb"
