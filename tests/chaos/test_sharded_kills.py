"""One job of the driver for random kills; ``python -m tests.chaos.sharded_kills`` runs many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .kill_moments import POINTS, draw_kills
from .sharded_kills import References, run_one

SEED = int(os.environ.get("KILLS_SEED", "2"))
STEPS = 120


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["fsdp-2x2", "tp-2x2"])
def test_workers_of_replicas_killed_at_random_moments_change_no_bit_P1_P2_P3(tmp_path: Path, layout: str) -> None:
    references = References(tmp_path / "references", STEPS)
    outcome = run_one(tmp_path / "job", references, layout, SEED, kills=2, steps=STEPS)

    assert outcome.problems == [], "\n".join(outcome.problems)
    assert outcome.kills


def test_a_seed_gives_the_same_kills_and_many_seeds_all_moments() -> None:
    assert draw_kills(7, 3) == draw_kills(7, 3)
    moments = {kill.moment for seed in range(200) for kill in draw_kills(seed, 3)}
    assert moments == {*POINTS, "delay", "joiner", "meanwhile"}
