"""All positions of a replica get the same answer, and take the same safe point."""

from __future__ import annotations

from craft.decide.step.beat import BeatAnswer, BeatMessage, before_commit, before_microbatch

WELL = BeatMessage()


def test_all_go_on_where_all_ran_whole_and_no_generation_waits() -> None:
    assert before_microbatch([WELL, WELL]) == BeatAnswer(go=True, confirms=True)


def test_all_regroup_where_a_generation_waits_for_one_and_what_they_computed_counts() -> None:
    assert before_microbatch([WELL, BeatMessage(waits=True)]) == BeatAnswer(go=False, confirms=True)


def test_nothing_is_confirmed_where_one_did_not_run_whole() -> None:
    assert before_microbatch([BeatMessage(whole=False), WELL]) == BeatAnswer(go=False, confirms=False)


def test_all_compute_for_comparison_what_position_0_says_whatever_the_others_would() -> None:
    said = [BeatMessage(extra=-1), WELL, BeatMessage(extra=-4)]

    assert before_microbatch(said) == BeatAnswer(go=True, confirms=True, extra=-1)
    assert before_microbatch([WELL, BeatMessage(extra=-1)]).extra == 0


def test_nothing_is_computed_for_comparison_before_all_have_entered_the_generation_that_waits() -> None:
    assert before_microbatch([BeatMessage(extra=-1), BeatMessage(waits=True)]).extra == 0


def test_positions_without_data_are_named() -> None:
    assert before_microbatch([WELL, BeatMessage(data=False), WELL]).without_data == (1,)


def test_all_commit_where_one_has_every_acknowledgement() -> None:
    """P3: it could not have them, if any member did not have the result."""
    broke = BeatMessage(whole=False)

    assert before_commit([broke, BeatMessage(may_commit=True)]).go
    assert before_commit([BeatMessage(may_commit=True), BeatMessage(may_commit=True)]) == BeatAnswer(
        go=True, confirms=True
    )


def test_all_regroup_where_the_exchange_of_one_broke_and_none_has_every_acknowledgement() -> None:
    assert before_commit([BeatMessage(whole=False), WELL]) == BeatAnswer(go=False, confirms=False)


def test_all_do_what_the_combined_word_says_where_no_exchange_broke() -> None:
    """P3: it says the same to all, for instance to send the gradients again."""
    assert before_commit([WELL, WELL]) == BeatAnswer(go=False, confirms=True)
