"""What of ft_launcher's own events is told to a lighthouse."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from craft.adapters.nvrx.cloud_events import EventSender
from craft.adapters.nvrx.launcher import LauncherEvents, main
from craft.settings.rundir import RunDir


class Heard(EventSender):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, str | int | float]]] = []

    def tell(self, what: str, **details: str | int | float) -> threading.Thread:
        self.events.append((what, details))
        thread = threading.Thread(target=lambda: None)
        thread.start()
        return thread


def record(source: str, state: str, rank: int | None) -> logging.LogRecord:
    metadata = {"state": state, "hostname": "node7", "global_rank": rank, "raw_error": None}
    event = {"name": f"torchelastic.worker.status.{state}", "source": source, "timestamp": 0, "metadata": metadata}
    return logging.LogRecord("events", logging.INFO, "", 0, json.dumps(event), None, None)


def test_failures_are_told_and_what_went_well_is_not() -> None:
    heard = Heard()
    ends = LauncherEvents(heard)
    ends.emit(record("WORKER", "SUCCEEDED", 0))
    ends.emit(record("WORKER", "FAILED", 1))
    ends.emit(record("AGENT", "FAILED", None))
    assert heard.events == [
        ("rank-failed", {"host": "node7", "message": "it failed", "rank": 1}),
        ("launcher-failed", {"host": "node7", "message": "it failed"}),
    ]


def test_a_lighthouse_that_is_away_is_a_line_in_the_log(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    EventSender(RunDir(tmp_path_factory.mktemp("run"))).tell("heartbeat-missed", rank=1).join()
    assert "cannot report heartbeat-missed to the lighthouse" in caplog.text


def test_the_run_directory_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--nproc-per-node", "2"])
    assert "--dir RUN" in capsys.readouterr().err
