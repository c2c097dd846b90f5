"""Where gradients are held until commit: on the device, in the memory of the host, or nowhere; the bits are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.jobs import TRAIN, Jobs, References, Result, describe

from craft.testing import Fault

WORKERS = 3
LIMIT_S = 120.0
HELD = Path(__file__).parent / "scripts" / "held.py"
FOUR_MIB = {"CRAFT_BUCKET_MB": "4"}


@pytest.mark.parametrize("hold", ["host", "recompute"])
def test_a_loss_in_the_middle_of_an_exchange_does_not_change_a_bit_P1_P2_P3(
    jobs: Jobs, references: References, hold: str
) -> None:
    """First with some buckets exchanged, over what was sent; then with the whole result here and not acknowledged."""
    faults = [
        Fault(point="flushed", step=4, rank=0, occurrence=2, after="result_sent"),
        Fault(point="before_acknowledge", step=6, rank=1),
    ]
    result = jobs.run(TRAIN, workers=WORKERS, options=["--hold", hold], faults=faults, limit_s=LIMIT_S)
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(references.digest(workers=1), faults=2, steps=10)
    assert_redone(result, everything=hold == "recompute")


def assert_redone(result: Result, *, everything: bool) -> None:
    """Whether after the first loss only what the lost one had was computed again, or all of the step."""
    redone = result.events("Recovered")[0]["redone"]
    assert (len(redone) == 8) == everything, redone


@pytest.mark.parametrize(("hold", "group"), [("host", "nccl"), ("recompute", "gloo")])
def test_a_gradient_that_comes_late_counts_though_the_result_was_written_over_it_P1(
    jobs: Jobs, references: References, hold: str, group: str
) -> None:
    """Of two steps; in the second one a worker is lost as well."""
    arguments, fault = ("--late-at", "3", "6"), Fault(point="result_sent", step=6, rank=2)
    options = ["--hold", hold, "--group", group]
    result = jobs.run(HELD, *arguments, workers=WORKERS, options=options, faults=[fault], limit_s=LIMIT_S)
    assert len(result.struck) == 1, describe(result)
    result.assert_exact(references.digest_of(HELD, *arguments, workers=1), faults=1, steps=8)


def most_held(result: Result) -> float:
    """In gradients of the model: what the worker had that needed most, beside its parameters."""
    lines = [log.read_text().strip().splitlines()[-1] for log in result.run_dir.glob("workers/*/log")]
    assert result.exit_code == 0 and len(lines) == WORKERS, describe(result)
    return max(float(json.loads(line)["most"]) for line in lines)


def test_a_whole_gradient_less_is_on_the_device_where_it_is_held_elsewhere(jobs: Jobs) -> None:
    arguments = ("--layers", "8", "--width", "2048")
    runs = {
        hold: jobs.start(HELD, *arguments, workers=WORKERS, options=["--hold", hold], environment=FOUR_MIB)
        for hold in ("device", "host", "recompute")
    }
    most = {hold: most_held(job.wait(LIMIT_S)) for hold, job in runs.items()}
    print(most)
    assert 0.9 < most["device"] - most["host"] < 1.1, most
    assert 0.9 < most["device"] - most["recompute"] < 1.1, most
