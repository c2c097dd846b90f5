"""Events of TorchElastic's, as torch itself makes them, in the form in which the lighthouse takes them."""

from __future__ import annotations

import json
import logging
import queue
from typing import Any

import msgspec
import pytest
from torch.distributed.elastic import events
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.events.api import Event, EventSource

from craft.adapters.torchelastic.events import NAME, EventForwarder, read, register
from craft.control.http.alert_formats import STRUCTURED, of_cloud_event
from craft.protocol.errors import Unreachable


def line(**metadata: Any) -> str:
    """As ``SimpleElasticAgent`` makes them."""
    about = {"run_id": "r1", "state": "FAILED", "agent_restarts": 2, **metadata}
    return Event("torchelastic.worker.status.FAILED", EventSource.WORKER, metadata=about).serialize()


def of_worker(error: object) -> str:
    more = json.dumps({"local_rank": [1], "exit_code": [-9], "worker_pid": [4711], "entry_point": "train.py"})
    return line(global_rank=3, raw_error=json.dumps(error), metadata=more)


def test_an_event_says_who_it_is_about_and_what_is_in_the_error_file() -> None:
    error = {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1"}}}
    event = read(of_worker(error), "h1")
    assert (event.kind, event.source) == ("torchelastic.worker.status.FAILED", "torchelastic/r1")
    assert event.data == {
        "host": "h1",
        "summary": "rank 3: FAILED: ValueError: no",
        "of": "WORKER",
        "state": "FAILED",
        "rank": 3,
        "local_rank": 1,
        "pid": 4711,
        "exit_code": -9,
        "restarts": 2,
        "error": "Traceback ...\nValueError: no",
    }


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"message": "a sentence"}, "a sentence"),
        ("<NONE>", "<NONE>"),
        (["?"], "['?']"),
        ({"message": {"message": "m", "extraInfo": None}}, "m"),
    ],
)
def test_an_error_file_may_hold_anything(raw: object, words: str) -> None:
    assert read(of_worker(raw), "h").data["error"] == words


def test_what_torchrun_itself_raised_is_a_plain_text() -> None:
    event = read(line(raw_error="Traceback\nRendezvousTimeoutError: late"), "h")
    assert event.data["summary"] == "torchrun: FAILED: RendezvousTimeoutError: late"
    assert "error" not in read(line(raw_error="NoneType: None\n"), "h").data


def test_a_very_long_error_stays_below_the_limits_of_the_lighthouse() -> None:
    event = read(line(raw_error="x" * 100_000), "h")
    body = {"specversion": "1.0", "id": "1", "source": event.source, "type": event.kind, "data": event.data}
    notice = of_cloud_event(msgspec.json.encode(body), {}, STRUCTURED)
    assert notice is not None and len(notice.labels["error"]) <= 2048


def test_torch_hands_its_events_to_the_handler_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_log_handlers", dict(handlers._log_handlers))
    monkeypatch.setattr(events, "_events_loggers", {})
    told: queue.Queue[str] = queue.Queue()
    register(lambda source, kind, **data: told.put(kind), "h1")
    events.record(Event.deserialize(line()), NAME)
    assert told.get(timeout=10) == "torchelastic.worker.status.FAILED"


def test_an_event_waits_for_a_lighthouse_that_is_being_started_again() -> None:
    told: queue.Queue[object] = queue.Queue()
    failures = [Unreachable("away"), Unreachable("still away")]

    def tell(source: str, kind: str, **data: object) -> None:
        if failures:
            raise failures.pop()
        told.put(data["host"])

    handler = EventForwarder(tell, "h")
    handler.handle(logging.LogRecord("n", logging.INFO, "f", 1, line(), None, None))
    assert told.get(timeout=10) == "h"
    handler.flush()


def test_a_line_that_is_no_event_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    handler = EventForwarder(print, "h")
    handler.handle(logging.LogRecord("n", logging.INFO, "f", 1, "rubbish", None, None))
    assert "not an event of TorchElastic" in caplog.text
