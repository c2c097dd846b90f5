from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from craft.groups.group import P2P

from ..cast import Actor, Cast, open_group

Run = Callable[..., list[Any]]


def reporting(group: P2P, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return what a function returns, and what it raises, to the test."""
    try:
        return function(group, *arguments), ""
    except Exception:  # noqa: BLE001  (the edge of a process: the test shows it)
        return None, traceback.format_exc()


def running(count: int) -> Iterator[Run]:
    cast = Cast()
    actors: list[Actor] = cast.actors(count)
    assert [outcome.error for outcome in open_group(1, actors)] == [""] * count

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in every process of the replica; return what it returned in each."""
        for actor in actors:
            actor.tell("call", 1, reporting, function, *arguments)
        answers = [actor.answer().value for actor in actors]
        assert [error for _, error in answers if error] == []
        return [value for value, _ in answers]

    yield run
    cast.end()


@pytest.fixture(scope="module")
def two(stage: None) -> Iterator[Run]:
    """Run in a replica of two processes."""
    yield from running(2)


@pytest.fixture(scope="module")
def four(stage: None) -> Iterator[Run]:
    """Run in a replica of four processes."""
    yield from running(4)
