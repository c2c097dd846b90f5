"""Where the threads of a guest are: exchanges and pauses of several, in any order."""

from __future__ import annotations

from pathlib import Path

from craft.protocol.values.activity import Phase
from craft.wire.activity import read
from craft.worker.external.blocked_tracker import BlockedTracker
from craft.worker.report.activity_page import ActivityPage


def phase(path: Path) -> Phase:
    doing = read(path)
    assert doing is not None
    return doing.phase


def test_it_is_paused_until_the_last_one_goes_on_whichever_that_is(tmp_path: Path) -> None:
    path = tmp_path / "activity"
    threads = BlockedTracker(ActivityPage(path))
    first, second = threads.paused("validation"), threads.paused("saving")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert phase(path) is Phase.PAUSED
    threads.exchange_began()
    assert phase(path) is Phase.PAUSED
    second.__exit__(None, None, None)
    assert phase(path) is Phase.EXCHANGING


def test_what_ends_after_the_loop_does_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "activity"
    threads = BlockedTracker(ActivityPage(path))
    threads.exchange_began()
    pause = threads.paused("saving")
    pause.__enter__()
    threads.end()
    pause.__exit__(None, None, None)
    threads.exchange_ended()
    assert phase(path) is Phase.ENDING
    # Nobody is in an exchange any more: a process that ends by itself is not ended here.
    threads.exchange_began()
    threads.free_or_end(0.0)
