"""The cheapest answer to a loss, from times that were measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from craft.decide.job import loss_costs
from craft.decide.job.apply import apply
from craft.decide.job.loss_costs import CostBook, choose, step_time
from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.decide.policies.policy import decide
from craft.decide.techniques import Loss, LossSettings, defaults
from craft.protocol.actions import Reconfigure
from craft.protocol.events import AnyEvent, TimesMeasured, WorkerJoined, WorkerLost
from craft.protocol.membership import Member


def times(left: int | None = 1000, **more: object) -> TimesMeasured:
    total = None if left is None else 100 + left
    fields = {"microbatches": 8, "step_s": ((4, 0.1),), "restart_s": 3.1, "spare_s": 0.5, **more}
    return TimesMeasured(step=100, total_steps=total, **fields)  # type: ignore[arg-type]


def test_near_the_end_nobody_is_started_and_the_figures_say_why() -> None:
    choice = choose(times(left=12), survivors=3, slots=4, spares=0)
    assert choice.answer == "redo"
    assert choice.reason == (
        "to redo costs 0.6 s, to fill the slot 0.7 s: 12 steps are left, each 0.05 s longer with 3 workers than with 4,"
        " and a replacement takes 3.1 s"
    )


def test_far_from_the_end_the_slot_is_filled_by_a_spare_or_by_one_that_is_started() -> None:
    assert choose(times(), survivors=3, slots=4, spares=0).answer == "restart"
    assert choose(times(), survivors=3, slots=4, spares=1).answer == "spare"
    endless = choose(times(left=None), survivors=3, slots=4, spares=0)
    assert endless.answer == "restart"
    assert "to redo more and more: an unknown number of steps is left" in endless.reason


def test_one_is_not_many() -> None:
    reason = choose(times(left=1), survivors=1, slots=3, spares=0).reason
    assert "1 step is left" in reason and "longer with 1 worker than with 3" in reason


def test_a_spare_pays_later_than_a_replacement_does() -> None:
    """There are ends so near that a replacement would come too late, and a spare does not."""
    assert choose(times(left=14), survivors=3, slots=4, spares=0).answer == "redo"
    assert choose(times(left=14), survivors=3, slots=4, spares=1).answer == "spare"


def test_where_a_loss_costs_nothing_it_stays() -> None:
    """9 microbatches: the largest share of 5 workers is 2, and so is that of 6."""
    choice = choose(times(microbatches=9, step_s=((6, 0.1),)), survivors=5, slots=6, spares=1)
    assert (choice.answer, choice.lost_s) == ("redo", 0.0)


def test_what_was_not_measured_is_said_to_be_assumed() -> None:
    assert "is assumed to take 10 s" in choose(times(restart_s=None), survivors=3, slots=4, spares=0).reason
    choice = choose(times(step_s=()), survivors=3, slots=4, spares=0)
    assert choice.answer == "restart" and choice.reason.startswith("no step time was measured yet")


def test_step_times_are_measured_ones_or_follow_from_the_largest_share() -> None:
    known = times(step_s=((4, 0.1), (2, 0.3)))
    assert step_time(known, 2) == 0.3
    assert step_time(known, 8) == 0.05
    assert step_time(times(step_s=()), 3) is None


@given(
    st.floats(0.001, 10),
    st.integers(0, 10_000),
    st.integers(1, 8),
    st.integers(0, 2),
    st.floats(0, 600),
    st.floats(0, 60),
)
def test_the_choice_is_never_dearer_than_going_on_without(
    step_s: float, left: int, survivors: int, spares: int, restart_s: float, spare_s: float
) -> None:
    slots = survivors + 1
    figures = times(left=left, microbatches=16, step_s=((slots, step_s),), restart_s=restart_s, spare_s=spare_s)
    choice = choose(figures, survivors=survivors, slots=slots, spares=spares)
    longer_s = (step_time(figures, survivors) or 0.0) - step_s
    assert choice.lost_s <= left * longer_s + 1e-9
    assert choice.answer in ("redo", "spare" if spares else "restart")


def test_the_book_learns_from_what_it_is_told() -> None:
    book = loss_costs.stepped(CostBook(), generation=1, members=4, step=5, step_s=9.0)
    assert book.step_s == (), "the first steps of a generation are no measure"
    book = loss_costs.stepped(book, generation=1, members=4, step=20, step_s=0.1)
    assert book.step_s == ((4, 0.1),)
    book = loss_costs.arrived(book, "s")
    book = loss_costs.lost(book, "w1", ("s",), 40.0)
    book = loss_costs.committed(book, "s", 40.5)
    assert (book.spare_s, book.restart_s) == (0.5, None)
    book = loss_costs.lost(book, "w2", (), 50.0)
    book = loss_costs.arrived(book, "w4")
    book = loss_costs.committed(book, "w4", 53.0)
    assert (book.spare_s, book.restart_s) == (0.5, 3.0)
    assert loss_costs.committed(book, "w4", 99.0) == book, "only its first commit counts"


def test_every_lost_slot_has_its_own_time() -> None:
    book = loss_costs.lost(CostBook(), "w1", (), 0.0)
    book = loss_costs.lost(loss_costs.arrived(book, "w4"), "w2", (), 9.0)
    book = loss_costs.committed(book, "w4", 10.0)
    assert (book.restart_s, book.spare_s) == (10.0, None), "not 1 s, and no spare: it came for the first one"
    book = loss_costs.committed(loss_costs.arrived(book, "w5"), "w5", 20.0)
    assert (book.restart_s, book.losses, book.arrivals) == (11.0, (), ())


def test_a_replacement_that_dies_before_it_commits_leaves_the_slot_empty_since_the_first_loss() -> None:
    book = loss_costs.arrived(loss_costs.lost(CostBook(), "w1", (), 0.0), "w4")
    book = loss_costs.arrived(loss_costs.lost(book, "w4", (), 5.0), "w5")
    assert loss_costs.committed(book, "w5", 8.0).restart_s == 8.0


def test_a_spare_that_dies_leaves_no_slot_and_one_that_was_not_needed_is_no_measure() -> None:
    book = loss_costs.arrived(loss_costs.arrived(CostBook(), "s"), "t")
    assert loss_costs.lost(book, "s", ("s", "t"), 1.0) == loss_costs.arrived(CostBook(), "t")
    book = loss_costs.left_empty(loss_costs.lost(book, "w1", ("s", "t"), 2.0))
    book = loss_costs.committed(loss_costs.lost(book, "w2", ("s", "t"), 100.0), "s", 100.5)
    assert book.spare_s == 0.5, "the slot of w1 was left free"


def test_what_an_earlier_lighthouse_had_measured_is_known_again() -> None:
    told = times(step_s=((4, 0.1), (3, 0.2)))
    assert loss_costs.measured(loss_costs.known(told), step=100, total_steps=1100, microbatches=8) == told
    assert loss_costs.known(None) == CostBook()


def test_under_auto_the_generation_says_whether_its_slots_are_filled() -> None:
    policies = defaults(Loss(LossSettings(answer="auto"))).policies()
    for left, replacing in ((12, False), (1000, True)):
        state = JobState(slots=2)
        events: tuple[AnyEvent, ...] = (
            *(WorkerJoined(member=Member(worker_id=name)) for name in "ab"),
            times(left=left, step_s=((2, 0.1),)),
            WorkerLost(worker_id="b", reason="killed"),
        )
        for event in events:
            state = observe(state, event)
            for action in decide(policies, state, event):
                state = apply(state, action, "n")
        assert isinstance(action, Reconfigure) and action.replacing is replacing
        assert state.replacing is replacing
        assert "to redo" in action.reason
        # Whoever comes all the same is a spare.
        late = WorkerJoined(member=Member(worker_id="c", late=True))
        state = observe(state, late)
        assert state.spares == ("c",)
