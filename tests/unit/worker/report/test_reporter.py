"""What a worker reports: settled generations, events for the journal, and pauses."""

from __future__ import annotations

from typing import Any, cast

import pytest

from craft.protocol.errors import BitsDiffer
from craft.protocol.events import (
    ConditionSeen,
    Event,
    GenerationEntered,
    ScriptWarned,
    StateDiverged,
    StepRetried,
    WorkerLost,
    WorkerPaused,
)
from craft.protocol.membership import DROPPED, Settlement
from craft.worker.membership.client import MembershipClient
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel
from craft.worker.report.reporter import EventOutbox, Reporter, paused


class Reports:
    """Stands in for the channel: holds the latest value of each field."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def report(self, *, urgent: bool = True, **changes: Any) -> None:
        self.latest |= changes


def reporter_with(reports: Reports | None, emitted: list[Event] | None = None) -> Reporter:
    membership = MembershipClient("w0", "127.0.0.1", b"", lambda *_: None, lambda: None)
    membership.progress = (0, 3, 0)
    return Reporter("w0", membership, cast("Channel | None", reports), (emitted if emitted is not None else []).append)


def settlement(owners: tuple[int, ...], given: tuple[int, ...] = ()) -> Settlement:
    return Settlement(step=3, commits=(), owners=owners, given=given)


def test_a_settled_generation_that_lost_nothing_clears_the_broken_group() -> None:
    reports = Reports()
    assert reporter_with(reports).settled(settlement((0, 1)), 2) is None
    assert reports.latest == {"generation": 2, "broken": None, "progress": (0, 3, 0)}


def test_a_settled_generation_reports_what_is_computed_again_and_what_is_dropped() -> None:
    reports = Reports()
    retried = reporter_with(reports).settled(settlement((0, DROPPED, 0), given=(2,)), 2)
    assert retried == StepRetried(generation=2, step=3, given=(2,), dropped=(1,)) == reports.latest["retried"]


def test_the_script_hears_of_the_retry_then_of_the_losses_then_of_the_generation() -> None:
    emitted: list[Event] = []
    reporter_with(Reports(), emitted).entered(settlement((0, 0), given=(1,)), 2, ("w1", "w2"))
    assert [type(each) for each in emitted] == [StepRetried, WorkerLost, WorkerLost, GenerationEntered]
    assert [each.worker_id for each in emitted if isinstance(each, WorkerLost)] == ["w1", "w2"]


def test_the_outbox_repeats_the_latest_events_and_conditions_displace_no_others() -> None:
    reports = Reports()
    outbox = EventOutbox(reports.report)
    for number in range(20):
        outbox.add(ScriptWarned(text=str(number)))
    for number in range(30):
        outbox.add(ConditionSeen(technique="heat", what=str(number), worker_id="w0", host="h", time=0.0))
    notes = reports.latest["notes"]
    assert [each.text for each in notes if isinstance(each, ScriptWarned)] == [str(each) for each in range(4, 20)]
    assert [each.what for each in notes if isinstance(each, ConditionSeen)] == [str(each) for each in range(14, 30)]


def test_only_a_long_pause_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    reporter = reporter_with(reports)
    with paused(ActivityPage(None), reporter, "short"):
        pass
    assert "notes" not in reports.latest

    monkeypatch.setattr("craft.worker.report.reporter._MIN_PAUSE_S", 0.0)
    with pytest.raises(ValueError, match="within"), paused(ActivityPage(None), reporter, "long"):
        raise ValueError("within")
    (note,) = reports.latest["notes"]
    assert isinstance(note, WorkerPaused) and (note.worker_id, note.reason) == ("w0", "long")


def test_divergence_and_lost_state_reach_the_report() -> None:
    reports = Reports()
    reporter = reporter_with(reports)
    reporter.diverged(BitsDiffer("w0 | w1"), 5, ("w0", "w1"))
    reporter.state_lost(4)
    assert reports.latest["diverged"] == StateDiverged(step=5, detail="w0 | w1", worker_ids=("w0", "w1"))
    assert reports.latest["state_gone"] == 4


def test_without_an_agent_nothing_is_reported_and_nothing_fails() -> None:
    reporter = reporter_with(None)
    reporter.note(ScriptWarned(text="alone"))
    reporter.unwritten("full")
    assert not reporter.is_heard
