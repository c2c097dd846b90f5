from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from craft.control.http.request_log import BURST, RequestLog


def test_messages_about_requests_are_few_and_those_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = [100.0]

    async def flood() -> None:
        log = RequestLog(lambda: clock[0])
        for _ in range(1000):
            log.exception("Error handling request from %s", "10.0.0.9", exc_info=BadHttpMessage("b'secret'"))
        assert len(caplog.messages) == BURST
        clock[0] += 10.0
        log.warning("one more")
        assert caplog.messages[-1] == "one more"
        log.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(flood())
    assert caplog.messages[0] == "a request from 10.0.0.9 cannot be read and was refused (BadHttpMessage)"
    assert caplog.messages[-1] == "990 more such messages about requests were left out"
    assert "secret" not in caplog.text


def test_the_count_of_those_left_out_comes_without_another_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("craft.control.http.request_log.PER_S", 100.0)

    async def flood() -> None:
        log = RequestLog(lambda: 0.0)
        for _ in range(13):
            log.warning("bad")
        while len(caplog.messages) == BURST:
            await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(flood())
    assert caplog.messages[-1] == "3 more such messages about requests were left out"


def test_a_failure_of_the_server_itself_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        RequestLog().exception("Unhandled exception", exc_info=ValueError("why"))
    assert "ValueError: why" in caplog.text
