"""A job of two hosts under faults of every kind, again and again: it ends with the bits of an undisturbed one (P1 to P3).

    SOAK_MINUTES=30 SOAK_SEED=1 SOAK_EVERY_S=5 pytest tests/chaos -s

With ``SOAK_SHARDED=1`` the job has three replicas of two workers. With ``SOAK_DIR`` the files stay there; ``resources.json``
has what every process used, second by second. For several seeds there is ``python -m tests.chaos``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .soak import SHARDED, WHOLE
from .verdict import soak_once

MINUTES = float(os.environ.get("SOAK_MINUTES", "0.5"))
EVERY_S = float(os.environ.get("SOAK_EVERY_S", "5"))
"""Mean time between two faults."""
SEED = int(os.environ.get("SOAK_SEED", "7"))
SHAPE = SHARDED if os.environ.get("SOAK_SHARDED") else WHOLE


@pytest.mark.timeout(60 * MINUTES * 1.5 + 300)
def test_faults_of_every_kind_change_no_bit_pause_for_reasons_only_and_leave_nothing_behind_P1_P2_P3(
    tmp_path: Path,
) -> None:
    verdict = soak_once(Path(os.environ.get("SOAK_DIR", tmp_path)) / "soak", SEED, 60 * MINUTES, EVERY_S, SHAPE)
    print(verdict.row)
    assert verdict.problems == (), "\n".join(verdict.problems)
