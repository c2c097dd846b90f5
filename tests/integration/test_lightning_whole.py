"""``Trainer(strategy="craft")`` where a step cannot be cut: manual optimization, several loaders, iterables (P1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault

from .jobs import Jobs, References, describe
from .test_lightning import the_end

SCRIPT = Path(__file__).parent / "scripts" / "train_lightning_whole.py"
STEPS = 30
"""Of three epochs of ten batches."""


def test_a_fit_that_ends_while_a_worker_catches_up_ends_on_that_worker_too_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """No result says that it was the last one: the framework's own loop decides that."""
    arguments = ("--data", "loader")
    hurry = tmp_path / "hurry"
    lost = Fault(point="batch", step=11, rank=0)
    behind = Fault(point="replayed", kind="sleep", seconds=4.0, worker="w2", occurrence=2)
    job = jobs.start(
        SCRIPT, *arguments, "--slow-until", str(hurry), workers=2, faults=[lost, behind],
        environment={"CRAFT_MAX_RESTARTS": "3"},
    )  # fmt: skip
    job.wait_for_committing(3)
    hurry.touch()
    result = job.wait()
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(references.digest_of(SCRIPT, *arguments, workers=1), faults=1, steps=STEPS)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--data", "stream"), marks=pytest.mark.long),
        pytest.param(("--data", "several", "--automatic"), marks=pytest.mark.long),
        pytest.param(("--data", "reloaded", "--automatic"), marks=pytest.mark.long),
        pytest.param(("--data", "loader"), marks=pytest.mark.long),
    ],
)
def test_a_fit_that_cannot_be_cut_goes_on_through_losses_and_joins_with_the_same_bits_P1(
    jobs: Jobs, references: References, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """One worker is lost in the middle of an epoch, and another one comes in its place, in an epoch after the first."""
    all_are_there = tmp_path / "all_are_there"
    slow = ("--slow-until", str(all_are_there))
    job = jobs.start(
        SCRIPT, *arguments, *slow, workers=2, faults=[Fault(point="batch", step=11, rank=0)],
        environment={"CRAFT_MAX_RESTARTS": "3"},
    )  # fmt: skip
    job.wait_for_committing(3)
    all_are_there.touch()
    result = job.wait()
    result.assert_exact(references.digest_of(SCRIPT, *arguments, workers=1), faults=1, steps=STEPS)
    end = the_end(result, workers=2)
    assert (end["epoch"], end["batches"]) == (3, STEPS), describe(result)
