"""Generated scripts under random kills: exact, or refused with a sentence (P1 to P3).

More than the short run: ``FUZZ_RUNS=100 FUZZ_SEED=1000 pytest tests/fuzz/test_fuzz.py``, or ``python -m tests.fuzz``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .driver import Driver
from .generator import generate
from .kills import draw_plan
from .verdict import judge

SHORT_RUN = (3302, 1411, 1475, 3727, 453, 3500)
"""Seeds whose scripts and kills cover every kind of loop, of kill and most features between them."""
ALONE = {
    "attempts": ("own_generator", "counter_in_attempt", "carried_state"),
    "steps": (
        "own_generator",
        "carried_within_step",
        "counts_forwards",
        "optimizer_not_registered",
        "clip_inside",
        "raises",
    ),
}
"""Mistakes that are refused outside of ``craft run`` already, by the kind of loop."""


def _seeds() -> tuple[int, ...]:
    runs = int(os.environ.get("FUZZ_RUNS", "0"))
    first = int(os.environ.get("FUZZ_SEED", "0"))
    return tuple(range(first, first + runs)) or SHORT_RUN


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("fuzz")) as driver:
        yield driver


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", _seeds())
def test_a_generated_script_is_exact_or_refused(driver: Driver, seed: int) -> None:
    script = generate(seed)
    result = driver.run(script, draw_plan(seed, dict(script.features)))
    assert not result.verdict.finding, str(result)


@pytest.mark.parametrize(("loop", "mistake"), [(loop, each) for loop in ALONE for each in ALONE[loop]])
def test_a_mistake_is_refused_by_a_job_of_one_worker(driver: Driver, loop: str, mistake: str, tmp_path: Path) -> None:
    script = generate(7, given={"mistake": mistake, "loop": loop, "whole": "none"})
    (tmp_path / "script.py").write_text(script.text)
    outcome = driver.undisturbed(tmp_path, script.files)
    assert judge(outcome, outcome, mistake=mistake, says=script.says).kind == "refused", outcome.errors
