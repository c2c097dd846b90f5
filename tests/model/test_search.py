"""Visit every reachable state of small jobs, driving the very functions that the real one runs.

``make test`` searches the worlds of ``SMALL``. ``MODEL_SEARCH=large`` adds those of ``LARGE``, which take minutes and
several gigabytes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from . import planted
from .rules import Rules
from .search import search
from .world import Bounds

SMALL = {
    "two crashes": Bounds(crashes=2),
    "a crash, a restarted lighthouse, a joiner": Bounds(joiners=1, steps=2, microbatches=2, crashes=1, restarts=1),
    "a worker cut off": Bounds(steps=2, cuts=1),
    "a worker cut off, a restarted lighthouse, a joiner, shrinking": Bounds(
        workers=2, joiners=1, microbatches=2, cuts=1, restarts=1, on_loss="shrink"
    ),
    "a broken exchange and a crash": Bounds(steps=2, microbatches=2, breaks=1, crashes=1),
    "late news of a crash, a restarted lighthouse, a joiner": Bounds(
        workers=2, joiners=1, steps=2, microbatches=2, crashes=1, restarts=1, late_news=True
    ),
    "late news of a crash and a broken exchange, a joiner": Bounds(
        workers=2, joiners=1, steps=2, microbatches=2, crashes=1, breaks=1, late_news=True
    ),
    "a worker is told to leave, another crashes": Bounds(steps=2, microbatches=2, drains=1, crashes=1),
    "a worker is told to leave, a spare takes its place": Bounds(
        workers=2, joiners=1, steps=2, microbatches=2, drains=1, crashes=0
    ),
    "a worker is told to leave, a restarted lighthouse": Bounds(workers=2, microbatches=2, drains=1, restarts=1),
    "all go back, two crashes": Bounds(steps=2, microbatches=2, back_after=0, crashes=2),
    "all go back, a crash, a joiner": Bounds(workers=2, joiners=1, steps=2, microbatches=2, back_after=0, crashes=1),
    "all go back, a worker cut off": Bounds(steps=2, microbatches=2, back_after=0, cuts=1),
    "all go back, a restarted lighthouse": Bounds(workers=2, microbatches=2, back_after=1, restarts=1, breaks=1),
    "all are lost, and another one begins again": Bounds(workers=2, fresh=1, steps=1, microbatches=2, crashes=2),
    "one worker is lost, another one begins again, a restarted lighthouse": Bounds(
        workers=1, fresh=1, steps=2, microbatches=2, crashes=1, restarts=1
    ),
    "all are lost, one of them only cut off": Bounds(
        workers=2, fresh=1, steps=1, microbatches=2, crashes=1, cuts=1, on_loss="shrink"
    ),
    "all are lost, and two others begin again": Bounds(workers=2, fresh=2, steps=2, microbatches=2, crashes=2),
    "one is slow, two crashes": Bounds(microbatches=6, steps=2, crashes=2, slow="a"),
    "one is slow, a crash, a joiner": Bounds(workers=2, joiners=1, steps=4, microbatches=4, crashes=1, slow="a"),
    "one is slow, a worker cut off": Bounds(workers=2, steps=3, microbatches=4, cuts=1, breaks=1, slow="b"),
    "one is slow, and told to leave": Bounds(workers=2, joiners=1, steps=4, microbatches=4, drains=1, slow="a"),
    "one is slow, all go back, a crash": Bounds(
        workers=2, joiners=1, steps=3, microbatches=4, back_after=1, crashes=1, slow="a"
    ),
    "two suspicions, a joiner": Bounds(workers=2, joiners=1, steps=1, microbatches=2, suspicions=2),
    "two suspicions, a joiner, two steps": Bounds(workers=2, joiners=1, steps=2, microbatches=2, suspicions=2),
    "two suspicions, a crash": Bounds(steps=2, microbatches=2, suspicions=2, crashes=1),
    "one worker alone, and suspected": Bounds(workers=1, joiners=1, steps=2, microbatches=2, suspicions=2, breaks=1),
    "one worker alone": Bounds(workers=1, restarts=1, breaks=1),
}

LARGE = {
    "two crashes, a joiner, an idle worker": Bounds(joiners=1, steps=2, microbatches=2, crashes=2),
    "a worker cut off and a crash, shrinking": Bounds(steps=2, microbatches=2, cuts=1, crashes=1, on_loss="shrink"),
    "two crashes, a restarted lighthouse, a joiner": Bounds(joiners=1, crashes=2, restarts=1),
    "two crashes, a restarted lighthouse, a joiner, shrinking": Bounds(
        joiners=1, steps=2, crashes=2, restarts=1, on_loss="shrink"
    ),
    "a worker cut off and a crash": Bounds(cuts=1, crashes=1),
    "a worker cut off and a crash, a joiner": Bounds(joiners=1, steps=2, microbatches=2, cuts=1, crashes=1),
    "late news of everything": Bounds(
        workers=2, joiners=1, steps=2, microbatches=2, crashes=1, breaks=1, restarts=1, late_news=True
    ),
    "late news of two crashes, a joiner": Bounds(joiners=1, steps=2, microbatches=2, crashes=2, late_news=True),
}

LONG = (
    "all are lost, and two others begin again",
    "a worker cut off, a restarted lighthouse, a joiner, shrinking",
    "late news of a crash and a broken exchange, a joiner",
    "a broken exchange and a crash",
    "a crash, a restarted lighthouse, a joiner",
    "one is slow, a worker cut off",
    "two suspicions, a crash",
    "two suspicions, a joiner, two steps",
)
"""Of the small ones, those that ``make test-long`` searches."""

WANTED = SMALL | (LARGE if os.environ.get("MODEL_SEARCH") == "large" else {})


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """A search makes millions of small values and no cycles: looking for some takes a fifth of the time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in WANTED])
def test_every_promise_holds_in_every_reachable_world_and_the_end_can_be_reached_from_it(name: str) -> None:
    """P2, P3: one history, each microbatch once, generations only grow, and nobody waits for ever."""
    found = search(WANTED[name])

    assert found.violation is None, f"\n{found.story}"
    print(f"{name}: {found.num_worlds} worlds, {found.num_moves} moves")


PLANTED = {
    "commits without all acknowledgements": (
        planted.COMMITS_WITHOUT_ACKNOWLEDGEMENTS,
        Bounds(steps=2, crashes=1),
        "does not hold the result in between",
    ),
    "asks only those who computed something": (
        planted.SKIPS_IDLE_MEMBERS,
        Bounds(steps=2, microbatches=2, crashes=1),
        "does not hold the result in between",
    ),
    "commits under an old generation after claiming": (
        planted.CLAIMS_WITHOUT_THE_PROMISE,
        Bounds(steps=2, crashes=1),
        "P3",
    ),
    "commits under an old generation after claiming, shrinking": (
        planted.CLAIMS_WITHOUT_THE_PROMISE,
        Bounds(steps=2, cuts=1, on_loss="shrink"),
        "P3",
    ),
    "uses a generation number again after a restart": (
        planted.REUSES_GENERATION_NUMBERS,
        Bounds(workers=2, joiners=1, steps=2, microbatches=2, crashes=1, restarts=1),
        "given out twice",
    ),
    "begins again in the same branch, though others may have committed in it": (
        planted.BEGINS_AGAIN_IN_THE_SAME_BRANCH,
        Bounds(workers=2, fresh=1, steps=1, microbatches=2, crashes=2, on_loss="shrink"),
        "P3",
    ),
    "stays though all went on without it": (
        planted.STAYS_THOUGH_ALL_WENT_ON,
        Bounds(steps=2, microbatches=2, drains=1, crashes=1),
        "does not hold the result in between",
    ),
    "takes a joiner for one that has the state": (
        planted.COUNTS_JOINERS_AS_WHOLE,
        Bounds(workers=2, joiners=1, steps=2, microbatches=2, crashes=1),
        "does not hold the result in between",
    ),
    "remembers who was slow in another generation": (
        planted.REMEMBERS_WHO_WAS_SLOW,
        Bounds(workers=2, joiners=1, steps=4, microbatches=4, crashes=1, slow="a"),
        "do not agree on who owns what",
    ),
    "goes back before all have the checkpoint": (
        planted.GOES_BACK_ALONE,
        Bounds(steps=2, microbatches=2, back_after=0, crashes=1),
        "has no checkpoint to go back to",
    ),
    "gives the last copy up for a newcomer without state": (
        planted.TAKES_NEWCOMERS_FOR_COPIES,
        Bounds(workers=2, joiners=1, steps=2, microbatches=2, suspicions=2),
        "the only copy of the training state",
    ),
    "waits for one that finished": (
        planted.WAITS_FOR_THE_FINISHED,
        Bounds(steps=2, crashes=1),
        "the job never finishes",
    ),
    "waits for spares that never got a slot": (
        planted.WAITS_FOR_SPARES,
        Bounds(workers=2, joiners=1, steps=1, microbatches=2),
        "the job never finishes",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_search_finds_a_planted_bug_and_tells_its_story(name: str) -> None:
    """P2, P3: a search that finds nothing is worth something only if it finds what is there."""
    rules, bounds, expected = PLANTED[name]

    found = search(bounds, rules)

    assert found.violation is not None and expected in found.violation
    assert found.story.endswith(found.violation)
    assert found.story.startswith("at first, directive generation=1-x")


def test_a_world_without_faults_has_one_generation_and_ends() -> None:
    found = search(Bounds(steps=1), Rules())

    assert found.violation is None
    assert found.num_worlds > 100
