"""Records are written on a thread, and nobody waits long for it."""

from __future__ import annotations

import threading
import time

import pytest

from craft.telemetry.records.background_writer import PATIENCE_S, BackgroundWriter

LIMIT_S = 30.0


def test_a_quick_write_is_done_when_the_next_is_submitted() -> None:
    writer = BackgroundWriter("test", 8)
    done: list[int] = []
    for number in range(100):
        writer.submit(lambda number=number: done.append(number))  # type: ignore[misc]
        assert done[:number] == list(range(number))
    assert writer.wait(LIMIT_S)
    assert done == list(range(100)) and writer.behind_s() == 0.0


def test_one_write_that_takes_long_is_waited_for_a_moment_and_the_next_ones_not_at_all() -> None:
    writer, go = BackgroundWriter("test", 8), threading.Event()
    done: list[int] = []
    writer.submit(lambda: done.append(int(not go.wait(LIMIT_S))))
    writer.submit(lambda: done.append(1))
    assert done == [] and writer.behind_s() >= PATIENCE_S
    began = time.monotonic()
    for number in range(2, 20):
        writer.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert time.monotonic() - began < PATIENCE_S
    go.set()
    assert writer.wait(LIMIT_S)
    # The thread had taken the first one; of the others the newest are kept.
    assert done == [0, *range(12, 20)]


def test_a_write_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter("test", 8)
    writer.submit(lambda: int("nothing"))  # type: ignore[arg-type]
    done: list[int] = []
    writer.submit(lambda: done.append(1))
    assert writer.wait(LIMIT_S) and done == [1]
    assert "a record could not be written" in caplog.text
