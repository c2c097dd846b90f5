"""The real agents and lighthouse, simulated: promises hold under a thousand seeds, and planted bugs are found."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .planted import PLANTED, Planted
from .seeds import run_seed

SEEDS = 1000
PARTS = 8
ROOT = Path(__file__).parents[2]
FOUND = (5000244, 5003143, 5006288, 5007120, 5007314)
"""Seeds that each found a defect of the agents or of the lighthouse; all are mended."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of faults are logged, each as it should be."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(PARTS))
def test_promises_hold_whatever_happens(part: int) -> None:
    size = SEEDS // PARTS
    for seed in range(part * size, (part + 1) * size):
        result = run_seed(seed)
        told = f"seed {seed}: {result.violation}\npython -m tests.simulation --seed {seed} tells its story"
        assert result.violation is None, told


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_found_a_defect_find_none_any_more(seed: int) -> None:
    assert run_seed(seed).violation is None


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name.replace(" ", "_"))
def test_a_planted_bug_is_found(planted: Planted) -> None:
    found = []
    with planted.plant():
        for seed in range(planted.first, planted.first + planted.seeds):
            violation = run_seed(seed, planted.kinds).violation
            if violation is not None:
                found.append(violation)
                if planted.finds in violation:
                    return
    pytest.fail(f"{planted.seeds} seeds, and it was not found; what was: {found}")


_STORIES = """
import hashlib, logging
from tests.simulation.seeds import run_seed
logging.disable(logging.CRITICAL)
for seed in range(20):
    print(seed, hashlib.sha256("".join(run_seed(seed).story).encode()).hexdigest())
"""


def test_a_seed_tells_the_same_story_in_every_process() -> None:
    def stories(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _STORIES]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert stories("1") == stories("2")


def test_torch_is_not_needed() -> None:
    code = "import sys, tests.simulation.seeds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
