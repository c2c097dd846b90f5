"""Objects within registered ones, and the script's frames and names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, SequentialLR

import craft.worker
from craft.worker.checks.object_search import name_in_script, objects_alive, reaches, script_line


class Target:
    def save(self) -> None: ...


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


def closure(target: Target) -> Callable[[], object]:
    return lambda: (lambda: target)()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda target: target,
        lambda target: {"a": [(target,)]},
        Holder,
        Slotted,
        closure,
        lambda target: target.save,
        lambda target: functools.partial(print, target),
        lambda target: functools.partial(print, end=Holder(target)),
    ],
)
def test_an_object_is_reached_through_what_may_save_it(wrap: Callable[[Target], Any]) -> None:
    target = Target()
    assert reaches([1, "text", wrap(target)], target)
    assert not reaches([wrap(target)], Target())


def test_a_scheduler_reaches_its_parts_and_not_its_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    parts: list[LRScheduler] = [ConstantLR(optimizer) for _ in range(2)]
    scheduler = SequentialLR(optimizer, parts, milestones=[3])
    assert reaches([scheduler], parts[1])
    assert not reaches([scheduler], optimizer)


def test_frames_of_every_worker_package_are_skipped_in_search_of_the_script() -> None:
    """Also of packages beside the one that searches, such as the loop that calls the checks."""
    place = Path(str(craft.worker.__file__)).parent / "loop" / "made_up.py"
    source = "def call(search, inner):\n    return search(inner)\n\n\ndef line(search):\n    return search()\n"
    scope: dict[str, Any] = {}
    exec(compile(source, str(place), "exec"), scope)
    of_the_script = Target()
    assert scope["call"](name_in_script, of_the_script) == "of_the_script"
    assert scope["line"](script_line).startswith("test_object_search.py, line ")


def test_objects_alive_are_found_by_kind_with_subclasses() -> None:
    mine, other = Target(), Holder(None)
    alive = objects_alive(Target, Holder)
    assert any(each is mine for each in alive[Target])
    assert any(each is other for each in alive[Holder])
