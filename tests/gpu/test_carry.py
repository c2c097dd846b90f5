"""``step.carry`` and ``step.gather`` with a model on a GPU that workers share (P1)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.jobs import Jobs, References
from tests.integration.test_carry import BPTT
from tests.integration.test_gather import CONTRASTIVE

from craft.testing import Fault

JOB_LIMIT_S = 150.0


@pytest.mark.parametrize(
    ("script", "fault", "steps"),
    [
        (BPTT, Fault(point="computed", step=4, rank=1), 24),
        (BPTT, Fault(point="committed", step=4, rank=0), 24),
        (CONTRASTIVE, Fault(point="gathering", step=4, rank=1), 16),
        (CONTRASTIVE, Fault(point="computed", step=4, rank=1, occurrence=4), 16),
    ],
    ids=["carried", "carried-and-committed", "gathering", "gathered"],
)
def test_what_is_carried_and_what_is_gathered_have_the_same_bits_after_a_loss_P1(
    jobs: Jobs, references: References, script: Path, fault: Fault, steps: int
) -> None:
    expected = references.digest_of(script, workers=1)
    result = jobs.run(script, workers=2, faults=[fault], limit_s=JOB_LIMIT_S)
    result.assert_exact(expected, faults=1, steps=steps)
