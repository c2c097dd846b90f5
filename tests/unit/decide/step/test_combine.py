from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from craft.decide.step.combine import combine
from craft.protocol.control_word import Combined, MicrobatchRecord, Word

scalars = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(-1e6, 1e6)).map(
    lambda pairs: tuple(sorted(pairs.items()))
)


@st.composite
def records_and_owners(draw: st.DrawFn) -> tuple[list[MicrobatchRecord], list[int], list[int]]:
    """The records of a step, and two ways to share them out."""
    size = draw(st.integers(1, 8))
    records = [
        MicrobatchRecord(
            microbatch=microbatch,
            weight=draw(st.floats(0, 100)),
            present=bytes([draw(st.integers(0, 255))]),
            scalars=draw(scalars),
            more=draw(st.booleans()),
            said=tuple(draw(st.lists(st.text(max_size=2), max_size=2))),
        )
        for microbatch in range(size)
    ]
    ranks = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return records, draw(ranks), draw(ranks)


def words(records: list[MicrobatchRecord], owners: list[int]) -> list[Word]:
    return [
        Word(step=3, records=tuple(record for record, owner in zip(records, owners, strict=True) if owner == rank))
        for rank in range(4)
    ]


@given(records_and_owners())
def test_the_combined_word_does_not_depend_on_who_computed_what(
    case: tuple[list[MicrobatchRecord], list[int], list[int]],
) -> None:
    """P1: to the last bit."""
    records, owners, others = case

    assert combine(words(records, owners)) == combine(words(records, others))


def combined(*given: Word) -> Combined:
    return combine(given)


WORD = Word(step=3)


def test_all_are_ready_for_what_the_least_ready_is_ready_for() -> None:
    """P4: joins are agreed on without a round trip."""
    assert combined(replace(WORD, ready=5), replace(WORD, ready=4), replace(WORD, ready=5)).ready == 4


def test_the_state_was_compared_if_all_who_keep_pace_told_a_digest() -> None:
    told = replace(WORD, digest=b"a", agreed=7)
    assert combined(told, told, replace(WORD, able=False)).compared
    assert not combined(told, WORD).compared
    whole = replace(WORD, whole=b"b")
    assert combined(whole, whole, replace(WORD, able=False)).compared_whole
    assert not combined(whole, WORD).compared_whole
    assert combined(told, replace(WORD, agreed=9)).agreed == 9


def test_the_first_reason_to_stop_counts() -> None:
    assert combined(WORD, replace(WORD, stop="done"), replace(WORD, stop="bored")).stop == "done"
    assert combined(WORD, WORD).stop is None


def test_one_that_must_send_again_makes_all_exchange_again() -> None:
    assert combined(WORD, replace(WORD, resend=True)).resend


def test_scalars_are_averaged_over_the_microbatches_that_logged_them_by_weight() -> None:
    one = MicrobatchRecord(microbatch=0, weight=1.0, present=b"\x01", scalars=(("loss", 2.0),))
    three = MicrobatchRecord(microbatch=1, weight=3.0, present=b"\x02", scalars=(("accuracy", 0.5), ("loss", 6.0)))

    answer = combined(replace(WORD, records=(three,)), replace(WORD, records=(one,)))

    assert answer.metrics == (("accuracy", 0.5), ("loss", 5.0))
    assert answer.total_weight == 4.0
    assert answer.present == b"\x03"


def test_a_scalar_of_weight_0_counts_only_where_none_weighs_more() -> None:
    none = MicrobatchRecord(microbatch=0, weight=0.0, present=b"", scalars=(("loss", float("nan")), ("tokens", 3.0)))
    also_none = replace(none, microbatch=1, scalars=(("tokens", 4.0),))
    one = replace(none, microbatch=2, weight=1.0, scalars=(("loss", 2.0),))

    assert combined(replace(WORD, records=(none, also_none, one))).metrics == (("loss", 2.0), ("tokens", 3.5))


def test_a_stream_has_ended_when_no_microbatch_has_more() -> None:
    last = MicrobatchRecord(microbatch=0, weight=1.0, present=b"", more=False)
    light = replace(last, weight=0.0)
    empty = replace(light, data=False)

    assert combined(replace(WORD, records=(last,))).ended
    assert not combined(replace(WORD, records=(last,))).empty
    assert not combined(replace(WORD, records=(light,))).empty
    assert combined(replace(WORD, records=(empty,))).empty
    assert not combined(replace(WORD, records=(empty, replace(light, microbatch=1)))).empty
    assert not combined(WORD).ended


def test_buffers_come_from_the_rank_that_names_them() -> None:
    answer = combined(WORD, replace(WORD, buffers=(0, 2)))

    assert (answer.buffers, answer.buffers_from) == ((0, 2), 1)
    assert combined(WORD).buffers_from == -1


def test_ranks_are_grouped_by_digest_with_the_majority_first() -> None:
    """P3: silent divergence shows; a worker without state has no digest and is no exception."""
    same, other = replace(WORD, digest=b"same"), replace(WORD, digest=b"other")

    assert combined(other, same, same, WORD).unequal_digests == ((1, 2), (0,))
    assert combined(same, same, WORD).unequal_digests == ()


def test_of_several_wishes_for_a_checkpoint_the_oldest_goes_first_whatever_else_is_due() -> None:
    periodic, second = replace(WORD, save=""), replace(WORD, save="zebra", wish=2)
    first = replace(WORD, save="ant", wish=1)
    assert (combined(periodic, second, first).save, combined(periodic, second, first).wish) == ("ant", 1)
    assert (combined(periodic, second).save, combined(periodic, second).wish) == ("zebra", 2)
    assert (combined(periodic, WORD).save, combined(periodic, WORD).wish) == ("", 0)
    assert combined(WORD, replace(WORD, save="", wish=3)).save == ""


def test_what_a_joiner_compares_with_is_that_of_whoever_computed_microbatch_0() -> None:
    assert combined(WORD, replace(WORD, sample=b"bits"), WORD).sample == b"bits"
    assert combined(WORD, WORD).sample == b""
