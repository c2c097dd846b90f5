"""Who is found slow, by which evidence, and what no noise may do."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from craft.decide.detect.stragglers import EVEN, MemberSpeeds, StragglerSettings, observed
from craft.decide.step.ledger import Ledger, begin, commit, complete
from craft.decide.step.plan import plan
from craft.decide.step.regroup import enter, settled
from craft.protocol.membership import Generation, Member, Settlement

SETTINGS = StragglerSettings()
times = st.integers(0, 10_000_000)


def after(
    steps: Iterable[Sequence[int]], settings: StragglerSettings = SETTINGS, pace: MemberSpeeds = EVEN
) -> MemberSpeeds:
    for step in steps:
        pace = observed(pace, step, settings)
    return pace


def steps_until_found(steps: Iterable[Sequence[int]], pace: MemberSpeeds = EVEN) -> int | None:
    for number, step in enumerate(steps, 1):
        pace = observed(pace, step, SETTINGS)
        if pace.found:
            return number
    return None


QUIET = after([(10_000, 10_000, 10_000, 10_000)] * 300)
"""What is known after many steps in which nothing happened."""


def test_one_of_four_that_takes_three_times_as_long_is_found_with_its_evidence() -> None:
    pace = after([(10_000, 10_400, 30_000, 9_800)] * 5, pace=QUIET)

    (found,) = pace.found
    assert (found.rank, found.steps) == (2, 5)
    assert found.ratio == pytest.approx(3.0)
    assert pace.slowness(range(4)) == (1.0, 1.0, 3.0, 1.0)


@pytest.mark.parametrize(
    ("ratio", "at_first", "later"), [(3.0, 7, 5), (2.0, 7, 5), (1.75, 14, 10), (1.6, 32, 25), (1.4, None, None)]
)
def test_the_slower_it_is_the_sooner_it_is_found(ratio: float, at_first: int | None, later: int | None) -> None:
    """At first a little later: it is not known yet how much noise there is."""
    steps = [(10_000, 10_000, 10_000, round(10_000 * ratio))] * 100

    assert steps_until_found(steps) == at_first
    assert steps_until_found(steps, pace=QUIET) == later


@given(st.integers(2, 20), st.integers(1, 50))
def test_where_all_are_slow_nobody_is(num_ranks: int, times_as_slow: int) -> None:
    usual, slow = [10_000] * num_ranks, [10_000 * times_as_slow] * num_ranks

    assert after([usual] * 30 + [slow] * 30 + [usual] * 30).suspicions == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=100), st.integers(2, 1000))
def test_one_long_step_of_anybody_now_and_then_is_no_evidence(struck: list[int], times_as_long: int) -> None:
    """A pause of the garbage collector, a page fault, a neighbour: one step in five, whoever it strikes."""
    usual = (10_000, 10_000, 10_000, 10_000)
    steps = []
    for rank in struck:
        steps += [tuple(us * times_as_long if at == rank else us for at, us in enumerate(usual)), *[usual] * 4]

    assert steps_until_found(steps) is None


def test_heavy_noise_alone_finds_nobody_in_ten_thousand_steps() -> None:
    """Each step of each worker takes up to 2.7 times as long as usual, and in one of fifty up to 20 times."""
    dice = random.Random(0)

    def noisy() -> int:
        return round(10_000 * (dice.uniform(1, 20) if dice.random() < 0.02 else 2.718 ** dice.uniform(-0.5, 0.5)))

    assert steps_until_found([noisy() for _ in range(4)] for _ in range(10_000)) is None


def test_noise_that_comes_in_bursts_finds_nobody_as_long_as_it_strikes_all_alike() -> None:
    """As on a machine with more to do than cores: in every step somebody has to wait, often the same one for a while."""
    dice = random.Random(2)
    struck = 0

    def step() -> list[int]:
        nonlocal struck
        struck = dice.randrange(4) if dice.random() < 0.5 else struck
        return [
            round(10_000 * (dice.uniform(1, 5) if rank == struck or dice.random() < 0.3 else dice.uniform(0.8, 1.2)))
            for rank in range(4)
        ]

    assert steps_until_found(step() for _ in range(10_000)) is None


def test_the_more_noise_there_is_the_longer_it_takes_to_find_somebody() -> None:
    """Of two of the others, now one and now the other takes twice as long."""
    noisy = after([(10_000, 20_000, 10_000, 10_000), (10_000, 10_000, 20_000, 10_000)] * 50)
    slow = [(10_000, 20_000, 10_000, 30_000), (10_000, 10_000, 20_000, 30_000)] * 50

    assert not noisy.found
    assert 10 < (steps_until_found(slow, pace=noisy) or 0) < 40


def test_under_the_same_noise_a_slow_one_is_found_within_twenty_steps() -> None:
    dice = random.Random(1)
    for _ in range(200):
        steps = [
            [round(10_000 * 2.718 ** dice.uniform(-0.5, 0.5)) * (3 if r == 1 else 1) for r in range(4)]
            for _ in range(20)
        ]
        assert steps_until_found(steps) is not None


def test_a_difference_that_nobody_would_notice_is_none() -> None:
    """With microbatches of a millisecond, a busy machine makes somebody three times as slow for a third of a second."""
    tiny = [(1_000, 1_000, 1_000, 3_000)]

    assert not after(tiny * 20).found
    assert after(tiny * 20, StragglerSettings(min_lost_ms=30.0)).found


def test_one_that_is_fast_again_is_gone_but_not_at_once() -> None:
    slow = after([(10_000, 10_000, 30_000)] * 50)

    assert after([(10_000, 10_000, 10_000)] * 10, pace=slow).found
    assert after([(10_000, 10_000, 10_000)] * 25, pace=slow).suspicions == ()


def test_two_of_five_can_be_slow_at_a_time() -> None:
    pace = after([(10_000, 30_000, 10_000, 10_000, 60_000)] * 30)

    assert pace.slowness(range(5)) == (1.0, 3.0, 1.0, 1.0, 6.0)
    assert len(after([(10_000, 30_000, 10_000, 60_000)] * 30).found) == 2


def test_a_share_follows_when_its_worker_becomes_much_slower_or_faster() -> None:
    slow = after([(10_000, 10_000, 20_000)] * 30)
    slower = after([(10_000, 10_000, 60_000)] * 64, pace=slow)
    faster = after([(10_000, 10_000, 20_000)] * 64, pace=slower)

    assert slow.slowness((2,)) == (2.0,)
    assert slower.slowness((2,))[0] > 4.0
    assert faster.slowness((2,))[0] < 3.0


def test_one_that_hung_for_a_moment_counts_for_no_more_than_eight_times() -> None:
    pace = after([(10_000, 10_000, 10_000, 10_000_000)] * 7)

    assert pace.slowness((3,)) == (8.0,)


def test_a_report_moves_nothing() -> None:
    pace = after([(10_000, 10_000, 30_000)] * 50, StragglerSettings(answer="report"))

    assert pace.found and pace.slowness(range(3)) == ()


def test_one_without_a_microbatch_says_nothing_and_hears_nothing() -> None:
    """A joiner on its way, or more workers than microbatches."""
    suspected = after([(10_000, 0, 30_000, 10_000)] * 3)

    assert observed(suspected, (10_000, 0, 0, 10_000), SETTINGS).suspicions == suspected.suspicions
    assert after([(10_000,)] * 20) == after([(0, 10_000)] * 20) == after([()] * 20) == EVEN


@given(
    st.lists(st.lists(times, min_size=4, max_size=4), max_size=60), st.sampled_from(["report", "rebalance", "drain"])
)
def test_whatever_is_measured_a_plan_comes_of_it(steps: list[list[int]], answer: str) -> None:
    """P2: every microbatch has one owner, and whoever had some keeps one."""
    pace = after(steps, StragglerSettings(answer=answer))  # type: ignore[arg-type]
    slowness = pace.slowness(range(4))

    assert all(each >= 1.0 for each in slowness)
    assert {each.rank for each in pace.found} >= {rank for rank, each in enumerate(slowness) if each > 1.0}
    assert sorted(set(plan(16, 4, slowness))) == [0, 1, 2, 3]


def generation(number: int, *names: str) -> Generation:
    return Generation(number=number, nonce="x", members=tuple(Member(worker_id=name) for name in names))


def test_members_plan_by_the_pace_of_their_generation_and_forget_it_with_it() -> None:
    """P2: who joins has not seen what the others have, and must come to the same plan."""
    even = Settlement(step=0, commits=(), owners=(), given=(), idle=(), joiners=())
    ledger = settled(enter(Ledger(worker_id="a"), generation(1, "a", "b")), even)
    slow = after([(30_000, 10_000)] * 7)

    ledger = commit(complete(begin(ledger, 8)), pace=slow)
    assert begin(ledger, 8).owners == (0, 0, 1, 1, 1, 1, 1, 1)
    ledger = settled(enter(ledger, generation(2, "a", "b", "c")), replace(even, step=1))
    assert ledger.pace == EVEN
    assert begin(ledger, 6).owners == (0, 0, 1, 1, 2, 2)


def test_a_member_that_is_given_nothing_is_left_out_of_an_uneven_plan_too() -> None:
    slow = after([(10_000, 0, 30_000)] * 7)
    ledger = Ledger(worker_id="a", members=("a", "b", "c"), idle=frozenset("b"), pace=slow)

    assert set(begin(ledger, 8).owners) == {0, 2}
