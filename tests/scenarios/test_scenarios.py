"""Every story file is told and compared with what it says; see ``story.py`` for how to rewrite them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_there_are_stories_of_every_kind() -> None:
    assert {path.parent.name for path in STORIES} == set(TELLERS)
