"""Why collectives of the script's own do not end, by real traces of three processes and by small made-up ones.

The traces are what ``tests/unit/worker/report/test_flight_recorder.py`` gets from torch, kept here as they were.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from craft.decide.detect.blocked_collectives import findings
from craft.protocol.values.inspection import Collective, Collectives

TRACES = Path(__file__).parent / "traces"


def entry(number: int, name: str = "all_reduce", size: int = 1, done: bool = False, dtype: str = "Float") -> Collective:
    return Collective(group="0", number=number, name=name, sizes=((size,),), dtypes=(dtype,), done=done)


def told(*entries: Collective, by: int, size: int = 3) -> Collectives:
    ranks = tuple(range(size))
    return Collectives(number=1, worker_id=f"w{by}", rank=by, groups={"0": ranks}, entries=entries)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "order",
            "mismatched order: worker w2 is at broadcast number 3 of 4 bytes while all others are at all_reduce number 3",
        ),
        (
            "size",
            "mismatched size: worker w2 is at all_reduce number 3 of 8 bytes while all others are at all_reduce number 3",
        ),
        ("missing", "missing rank: worker w2 has not come to all_reduce number 3, in which workers w0, w1 wait"),
    ],
)
def test_real_traces_are_understood(kind: str, words: str) -> None:
    traces = msgspec.json.decode((TRACES / f"{kind}.json").read_bytes(), type=list[Collectives])

    (found,) = findings(traces)

    assert found.startswith(words), found


def test_where_all_fit_there_is_nothing_to_find() -> None:
    assert findings([told(entry(1, done=True), entry(2), by=rank) for rank in range(3)]) == ()
    assert findings([]) == ()


def test_a_collective_that_everybody_has_behind_them_is_not_blamed() -> None:
    odd = told(entry(1, size=9, done=True), entry(2), by=2)

    assert findings([told(entry(1, done=True), entry(2), by=rank) for rank in range(2)] + [odd]) == ()


def test_of_two_who_differ_both_are_named() -> None:
    (found,) = findings([told(entry(4), by=0, size=2), told(entry(4, "broadcast"), by=1, size=2)])

    assert found == (
        "mismatched order: worker w0 is at all_reduce number 4 of 4 bytes while worker w1 is at broadcast number 4 of 4 bytes"
    )


def test_types_that_differ_are_named_though_the_sizes_agree() -> None:
    (found,) = findings([told(entry(4), by=0), told(entry(4), by=1), told(entry(4, dtype="Double"), by=2)])

    assert found.startswith("mismatched types: worker w2 is at all_reduce number 4 of Double while all others are")


def test_a_rank_that_started_nothing_is_missing() -> None:
    (found,) = findings([told(entry(1), by=0), told(entry(1), by=1), told(by=2)])

    assert found.startswith("missing rank: worker w2 has not come to all_reduce number 1")
    assert found.endswith("it has started none in this group")


def test_of_a_rank_that_tells_nothing_it_is_said_that_nothing_is_known() -> None:
    (found,) = findings([told(entry(1), by=0), told(entry(1), by=1)])

    assert found == "workers w0, w1 are at all_reduce number 1, and of 1 ranks of the group nothing is known"


def test_shares_of_a_scatter_may_differ_in_size() -> None:
    assert findings([told(entry(1, "scatter", size=rank), by=rank) for rank in range(3)]) == ()
