"""Hooks of techniques: called at their points in order; those of other packages cannot end the training."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from craft.decide.techniques.technique import Chosen, Hooks, Moment, NoSettings, Surroundings, Technique
from craft.protocol.errors import ConfigError
from craft.protocol.events import AnyNote, CheckpointSkipped, ConditionSeen, TechniqueFailed
from craft.settings.worker import WorkerSettings
from craft.worker.loop.inner_loop.hooks import StepHooks, hooks_of
from craft.worker.membership.client import MembershipClient
from craft.worker.report.reporter import Reporter

MOMENT = Moment(step=3, branch=0, generation=1, members=("w0",))


class Heard(Reporter):
    """Remembers what would be reported."""

    def __init__(self) -> None:
        super().__init__(
            "w0", MembershipClient("w0", "127.0.0.1", b"", lambda *_: None, lambda: None), None, lambda _: None
        )
        self.told: tuple[AnyNote, ...] = ()

    def report(self, *, urgent: bool = True, **changes: Any) -> None:
        self.told = changes.get("notes", self.told)


class Foreign(Technique[NoSettings]):
    name = "foreign"
    summary = "made for a test"

    def hooks(self, surroundings: Surroundings) -> Any:
        Foreign.surroundings = surroundings
        return Foreign.made

    made: Any = None
    surroundings: Surroundings


def step_hooks(hooks: Any, reporter: Heard) -> StepHooks:
    Foreign.made = hooks
    found = hooks_of(Chosen([Foreign(NoSettings())]), {}, WorkerSettings(), reporter)
    return StepHooks(found, reporter.note, lambda **more: msgspec.structs.replace(MOMENT, **more))


class Counting(Hooks):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_commit(self, moment: Moment) -> None:
        self.seen.append(moment.step)


def test_only_what_is_overridden_is_called() -> None:
    hooks = Counting()
    there = step_hooks(hooks, Heard())
    there.reach("batch_start", microbatch=1)
    there.reach("after_commit", step=4)
    assert hooks.seen == [4]


def test_hooks_that_raise_are_left_out_and_told_of_once() -> None:
    class Wrong(Hooks):
        def after_commit(self, moment: Moment) -> None:
            raise LookupError("x")

    reporter = Heard()
    there = step_hooks(Wrong(), reporter)
    there.reach("after_commit")
    there.reach("after_commit")
    assert [type(note) for note in reporter.told] == [TechniqueFailed]


def test_what_is_no_hooks_is_told_of_and_nothing_else() -> None:
    reporter = Heard()
    step_hooks({"a": 1}, reporter).reach("after_commit")
    (failed,) = reporter.told
    assert isinstance(failed, TechniqueFailed) and "Hooks" in failed.error


@pytest.mark.parametrize("given", [(5,), ("hot", "x"), ("hot", None, 7), ("x" * 200,), ("hot", None, "x" * 2000)])
def test_a_condition_of_the_wrong_kind_is_its_tellers_error(given: tuple[Any, ...]) -> None:
    reporter = Heard()
    step_hooks(Counting(), reporter)
    with pytest.raises((msgspec.ValidationError, ConfigError, TypeError)):
        Foreign.surroundings.tell(*given)
    assert reporter.told == ()


def test_a_flood_of_conditions_is_cut_and_pushes_out_nothing_else() -> None:
    reporter = Heard()
    step_hooks(Counting(), reporter)
    reporter.note(CheckpointSkipped(step=1, reason="busy"))
    for number in range(1000):
        Foreign.surroundings.tell("hot", float(number))
    assert isinstance(reporter.told[0], CheckpointSkipped)
    assert 10 <= sum(isinstance(note, ConditionSeen) for note in reporter.told) <= 20
