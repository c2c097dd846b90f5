"""One control word over all members of sharded replicas: what decides about a step is the same in every column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.decide.step.columns import combine_columns
from craft.decide.step.combine import combine
from craft.decide.step.replicas import Layout
from craft.protocol.control_word import MicrobatchRecord, Word
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Slot

FOUR = Layout(2, (Slot(0, 0), Slot(0, 1), Slot(1, 0), Slot(1, 1)))


def record(microbatch: int, weight: float = 1.0, present: bytes = b"\1", **scalars: float) -> MicrobatchRecord:
    return MicrobatchRecord(
        microbatch=microbatch, weight=weight, present=present, scalars=tuple(sorted(scalars.items()))
    )


def words(*records: MicrobatchRecord, **fields: object) -> Word:
    return Word(step=3, records=records, **fields)  # type: ignore[arg-type]


def test_weights_and_scalars_count_once_for_a_microbatch_and_not_once_for_a_position() -> None:
    sent = [
        words(record(0, 2.0, loss=1.0)),
        words(record(0, 2.0, loss=3.0)),
        words(record(1, loss=5.0)),
        words(record(1)),
    ]

    for position in (0, 1):
        combined = combine_columns(sent, FOUR, position)
        assert combined.total_weight == 3.0
        assert combined.metrics == (("loss", (2.0 * 2.0 + 5.0) / 3.0),)


def test_a_resend_in_one_column_holds_for_all() -> None:
    sent = [words(record(0)), words(record(0), resend=True), words(record(1)), words(record(1))]

    assert [combine_columns(sent, FOUR, position).resend for position in (0, 1)] == [True, True]


def test_parameters_and_buffers_belong_to_a_position() -> None:
    sent = [
        words(record(0, present=b"\1"), buffers=(4,)),
        words(record(0, present=b"\2"), buffers=(5,)),
        words(record(1, present=b"\1")),
        words(record(1, present=b"\4")),
    ]
    first, second = (combine_columns(sent, FOUR, position) for position in (0, 1))

    assert (first.present, first.buffers, first.buffers_from) == (b"\1", (4,), 0)
    assert (second.present, second.buffers, second.buffers_from) == (b"\6", (5,), 1)


def test_digests_are_compared_between_twins_only_and_a_difference_is_seen_by_all() -> None:
    same = [words(digest=b"x"), words(digest=b"y"), words(digest=b"x"), words(digest=b"y")]
    assert not combine_columns(same, FOUR, 0).differs
    unequal = [words(digest=b"x"), words(digest=b"y"), words(digest=b"x"), words(digest=b"z", newcomer=True)]

    for position in (0, 1):
        combined = combine_columns(unequal, FOUR, position)
        assert (combined.unequal_digests, combined.outcasts) == (((1,), (3,)), (3,))


def test_no_newcomer_leaves_where_in_another_column_it_is_not_known_who_is_wrong() -> None:
    sent = [words(digest=b"x"), words(digest=b"y"), words(digest=b"w"), words(digest=b"z", newcomer=True)]

    assert combine_columns(sent, FOUR, 1).outcasts == ()


def probed(*probes: bytes, newcomers: tuple[int, ...] = ()) -> list[Word]:
    return [words(probe=probe, newcomer=rank in newcomers) for rank, probe in enumerate(probes)]


def test_replicas_that_compute_other_bits_are_named_whole_whichever_position_is_wrong() -> None:
    """P1: the wrong numbers of one position reach the others of its replica, so that its column says nothing about it."""
    for sent in (probed(b"a", b"b", b"x", b"y"), probed(b"a", b"b", b"a", b"y"), probed(b"a", b"b", b"x", b"b")):
        combined = combine_columns(sent, FOUR, 0)

        assert combined.differs and combined.unequal_probes == ((0, 1), (2, 3))
        assert combined.outcasts == ()


def test_a_replica_in_which_a_digest_is_missing_is_compared_by_the_others() -> None:
    assert not combine_columns(probed(b"a", b"b", b"a", b""), FOUR, 0).differs
    assert combine_columns(probed(b"a", b"b", b"", b"y"), FOUR, 1).unequal_probes == ((0, 1), (2, 3))


def test_only_the_newcomer_leaves_a_replica_that_computes_other_bits_with_it() -> None:
    sent = probed(b"a", b"b", b"x", b"y", newcomers=(3,))

    assert [combine_columns(sent, FOUR, position).outcasts for position in (0, 1)] == [(3,), (3,)]


def test_no_newcomer_leaves_where_replicas_differ_that_have_none() -> None:
    six = Layout(2, (*FOUR.slots, Slot(2, 0), Slot(2, 1)))
    sent = probed(b"a", b"b", b"x", b"y", b"p", b"q", newcomers=(3,))

    assert combine_columns(sent, six, 0).outcasts == ()
    assert combine_columns(probed(b"a", b"b", b"x", b"y", b"a", b"b", newcomers=(3,)), six, 0).outcasts == (3,)


def test_different_weights_of_one_microbatch_are_refused_by_its_number() -> None:
    sent = [words(record(0, 2.0)), words(record(0, 3.0)), words(), words()]

    with pytest.raises(
        ConfigError, match=r"step.weight of microbatch 0 is 2 on one position of its replica and 3 on another"
    ):
        combine_columns(sent, FOUR, 0)


WORDS = st.builds(
    Word,
    step=st.just(3),
    ready=st.integers(0, 3),
    able=st.booleans(),
    resend=st.booleans(),
    digest=st.sampled_from([b"", b"x", b"y"]),
    newcomer=st.booleans(),
    busy_us=st.integers(0, 5),
)


@given(st.lists(WORDS, min_size=1, max_size=5), st.data())
def test_with_replicas_of_one_worker_it_is_the_word_of_all(found: list[Word], data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, len(found) - 1), max_size=6))
    full = [
        Word(
            step=3,
            records=tuple(record(each, loss=each / 2) for each, owner in enumerate(owners) if owner == rank),
            ready=word.ready,
            able=word.able,
            resend=word.resend,
            digest=word.digest,
            newcomer=word.newcomer,
            busy_us=word.busy_us,
        )
        for rank, word in enumerate(found)
    ]

    assert combine_columns(full, Layout(), 0) == combine(full)
