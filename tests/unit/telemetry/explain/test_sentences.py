from __future__ import annotations

from typing import Any

import msgspec
import pytest

from craft.protocol.actions import AnyAction, Preempt, TakeCheckpoint
from craft.protocol.events import (
    AnyEvent,
    AnyNote,
    CheckpointAbandoned,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointSkipped,
    CheckpointWritten,
    ConditionSeen,
    IntervalChosen,
    NumbersDiverged,
    Recovered,
    RolledBack,
    ScriptWarned,
    StartStepTaken,
    StragglerFound,
    StragglerGone,
    TechniqueFailed,
    WorkerPaused,
)
from craft.telemetry.explain.amounts import size
from craft.telemetry.explain.sentences import WORDINGS, sentence

WRITTEN = CheckpointWritten(
    name="c", branch=0, step=120, url="s3://b/j", total_bytes=1_300_000_000, new_bytes=2_000_000, seconds=3.14
)
SLOW = StragglerFound(
    worker_id="w2", generation=1, step=40, ratio=3.04, own_ms=91.23, others_ms=30.0, steps=8, answer="rebalance"
)
FAILED = CheckpointFailed(worker_id="w1", name="c", step=9, error="disk full", tries=2, retry_s=1.0)

NOTES: list[tuple[AnyNote, str]] = [
    (WRITTEN, "checkpoint written: step 120 (1.3 GB, 2.0 MB of it new, 3.1 s)"),
    (
        msgspec.structs.replace(WRITTEN, new_bytes=1_300_000_000, tag="best"),
        "checkpoint written: step 120 (1.3 GB, all of it new, 3.1 s), tagged best",
    ),
    (
        Recovered(worker_id="w0", generation=2, since=1, lost=("w1",), step=11, lost_s=0.04),
        "step 11 is committed, the first one since, in generation 2",
    ),
    (CheckpointSkipped(step=9, reason="busy"), "no checkpoint at step 9: busy"),
    (FAILED, "w1 could not write its share of the checkpoint of step 9: disk full (try 2; the next one in 1.0 s)"),
    (
        msgspec.structs.replace(FAILED, tries=8, retry_s=None),
        "w1 could not write its share of the checkpoint of step 9: disk full"
        " (given up after 8 tries: there will be no such checkpoint)",
    ),
    (CheckpointAbandoned(name="c", step=9, reason="w1 was lost"), "no checkpoint of step 9: w1 was lost"),
    (
        CheckpointRejected(name="c", step=9, url="u", reason="a chunk is torn"),
        "checkpoint of step 9 cannot be used: a chunk is torn",
    ),
    (CheckpointRestored(name="c", branch=0, step=9, url="u"), "goes on from the checkpoint of step 9 in u"),
    (IntervalChosen(interval_s=12.52, reason="it is cheap"), "a checkpoint every 12.5 s: it is cheap"),
    (WorkerPaused(worker_id="w1", reason="evaluation", seconds=12.34), "w1 was paused for 12.3 s (evaluation)"),
    (ScriptWarned(text="do that"), "warning: do that"),
    (StartStepTaken(step=9), "begins at step 9, with what the script has loaded itself"),
    (NumbersDiverged(step=9, what="loss is nan", answer="left out"), "step 9: loss is nan: left out"),
    (
        RolledBack(branch=1, step=9, left_at=12, skipped=3, reason="nan"),
        "rolled back from step 12 to step 9, without the data of 3 steps: nan",
    ),
    (
        ConditionSeen(technique="thermal", what="heat", worker_id="w1", host="h", value=95.0, detail="too hot"),
        "thermal saw heat (95) on w1: too hot",
    ),
    (
        TechniqueFailed(technique="thermal", where="after_commit", error="KeyError: 'x'"),
        "technique thermal failed and is left out from now on (after_commit): KeyError: 'x'",
    ),
    (
        SLOW,
        "w2 is slow: a microbatch takes 91.2 ms there and 30 ms elsewhere, 3 times as long, over 8 steps:"
        " microbatches move to the others",
    ),
    (
        msgspec.structs.replace(SLOW, answer="report"),
        "w2 is slow: a microbatch takes 91.2 ms there and 30 ms elsewhere, 3 times as long, over 8 steps",
    ),
    (StragglerGone(worker_id="w2", generation=1, step=90), "w2 is as fast as the others again"),
    (ScriptWarned(text="the loss is a sum"), "warning: the loss is a sum"),
]


@pytest.mark.parametrize(("note", "words"), NOTES, ids=lambda value: type(value).__name__)
def test_what_workers_tell_is_said_in_plain_words(note: AnyNote, words: str) -> None:
    assert sentence({"time": 1.0, "kind": "event", **msgspec.to_builtins(note)}) == words


def test_every_note_has_a_sentence() -> None:
    assert {type(note) for note, _ in NOTES} == set(AnyNote.__args__)


def test_a_job_that_makes_room_says_why_and_until_when() -> None:
    line = msgspec.to_builtins(Preempt(reason="SIGTERM", deadline=1e9))
    said = sentence(line)
    assert said.startswith("preempted (SIGTERM): takes a checkpoint at the next step boundary, until ")
    assert sentence(msgspec.to_builtins(TakeCheckpoint(reason="asked", tag="best"))) == (
        "checkpoint best at the next step boundary: asked"
    )


def test_sizes_have_three_digits_and_a_unit() -> None:
    assert [size(count) for count in (0, 999, 1000, 88_648, 2**30, 5 * 10**15)] == [
        "0 bytes", "999 bytes", "1.0 kB", "88.6 kB", "1.1 GB", "5000.0 TB",
    ]  # fmt: skip


COST: dict[str, Any] = {
    "outcome": "Cost", "worker_ids": ["w1"], "lost_ms": 43.2, "steps_retried": 1, "microbatches_redone": 2,
    "samples_redone": 8, "microbatches_dropped": 0, "samples_dropped": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the loss of w1 cost 43 ms, a step taken up again, 2 microbatches (8 samples) computed again"),
        (
            {"worker_ids": [], "steps_retried": 0, "microbatches_redone": 0, "samples_redone": 0},
            "the broken exchange cost 43 ms, no step taken up again, no microbatch computed again",
        ),
        (
            {"microbatches_redone": 0, "samples_redone": 0, "microbatches_dropped": 1, "samples_dropped": 1},
            "the loss of w1 cost 43 ms, a step taken up again, no microbatch computed again, 1 microbatch (1 sample) dropped",
        ),
        (
            {"lost_ms": None, "samples_redone": None},
            "the loss of w1 cost an unknown time (no step was committed before), a step taken up again,"
            " 2 microbatches computed again",
        ),
    ],
)
def test_what_a_loss_cost_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    assert sentence({**COST, **changes}) == said


def test_whoever_looks_for_a_cause_gets_a_sentence_for_every_event_and_action() -> None:
    told = {each.__name__ for union in (AnyEvent, AnyAction) for each in union.__args__}

    assert told - WORDINGS.keys() - UNTOLD == set()


UNTOLD = {"PreemptRequested", "PreemptExpired", "CheckpointRequested"}
"""Followed at once by an action that says the same."""
