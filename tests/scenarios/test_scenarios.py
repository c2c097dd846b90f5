"""Every story file is told and compared with what it says; see ``story.py`` for how to rewrite them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from craft.decide.policies.membership import FormPolicy

from .story import Line, read, retold
from .tellers import Lighthouse, Settling

HERE = Path(__file__).parent
STORIES = sorted(HERE.glob("*/*.txt"))
TELLERS: dict[str, Callable[[], Callable[[tuple[Line, ...]], list[str]]]] = {
    "lighthouse": Lighthouse,
    "settle": Settling,
}


@pytest.mark.parametrize("path", STORIES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_story_goes_as_it_is_written(path: Path) -> None:
    told = retold(list(read(path)), TELLERS[path.parent.name]())

    if os.environ.get("REWRITE") == "1":
        path.write_text(told)
    assert path.read_text() == told


@pytest.mark.parametrize(
    "path", [path for path in STORIES if path.parent.name == "lighthouse"], ids=lambda path: path.stem
)
def test_no_job_of_a_story_stands_still_though_nothing_is_under_way(path: Path) -> None:
    teller = Lighthouse()
    retold(list(read(path)), teller)
    assert teller.chronicle.violations() == []


def test_a_job_that_does_nothing_about_a_loss_is_found_to_stand_still() -> None:
    """Told by a lighthouse whose policies never answer a loss, a story must not pass."""
    teller = Lighthouse(policies=lambda _: (FormPolicy(),))
    retold(list(read(HERE / "lighthouse" / "one_loss.txt")), teller)
    (violation,) = teller.chronicle.violations()
    assert "no step was committed" in violation and "WorkerLost worker_id=" in violation


def test_there_are_stories_of_every_kind() -> None:
    assert {path.parent.name for path in STORIES} == set(TELLERS)
