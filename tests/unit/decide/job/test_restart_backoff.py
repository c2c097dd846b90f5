"""Who comes in the place of a lost worker, and when."""

from __future__ import annotations

from craft.decide.job.restart_backoff import AT_ONCE_S, MOST_YOUNG, Restarts, worker_ended


def test_whoever_had_a_part_is_replaced_at_once_and_whoever_had_none_ever_later_and_not_for_ever() -> None:
    restarts, delays = Restarts(), list[float | None]()
    for _ in range(MOST_YOUNG):
        restarts, delay_s = worker_ended(restarts, worked=False, max_restarts=1000)
        delays.append(delay_s)
    assert delays == [AT_ONCE_S, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert restarts.exhausted is not None and "had a part" in restarts.exhausted


def test_one_that_worked_makes_up_for_those_that_did_not() -> None:
    restarts, _ = worker_ended(Restarts(young=MOST_YOUNG - 2), worked=True, max_restarts=1000)
    assert restarts.young == 0
    assert worker_ended(restarts, worked=False, max_restarts=1000)[1] == AT_ONCE_S


def test_there_are_no_more_than_were_allowed() -> None:
    restarts, delay_s = worker_ended(Restarts(count=2), worked=True, max_restarts=2)
    assert delay_s is None and restarts.exhausted == "--max-restarts is 2, and as many were started"


def test_one_that_is_killed_while_it_waits_for_the_others_says_nothing_about_the_next_one() -> None:
    restarts = Restarts()
    for _ in range(2 * MOST_YOUNG):
        restarts, delay_s = worker_ended(restarts, worked=False, waited=True, max_restarts=1000)
        assert delay_s == AT_ONCE_S
    assert worker_ended(restarts, worked=False, max_restarts=1000)[0].young == 1
