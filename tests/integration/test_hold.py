"""Nothing is held of what was sent (``--hold recompute``): after a loss it is computed again, with the same bits."""

from __future__ import annotations

import json
from typing import Any

from craft.testing import Fault

from .jobs import Jobs, References, Result, describe

STEPS = 10
ALL = list(range(8))


def redone(result: Result) -> dict[int, list[int]]:
    """By the step that was committed next: what was computed again after losses."""
    return {line["step"]: line["redone"] for line in result.events("Recovered")}


def entered(result: Result, worker: str) -> list[dict[str, Any]]:
    """What a worker wrote down of the generations that it came into."""
    file = result.run_dir / "workers" / worker / "generations.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_after_a_loss_the_whole_step_is_computed_again_with_the_same_bits_P1_P2_P3(
    jobs: Jobs, references: References
) -> None:
    """With part of a bucket exchanged; before anything was sent; with the result in some hands and not in others."""
    faults = [
        Fault(point="flushed", step=2, rank=0, occurrence=2, after="result_sent"),
        Fault(point="batch", step=5, rank=2),
        Fault(point="acknowledging", step=7, rank=1),
    ]
    result = jobs.run(faults=faults, options=["--hold", "recompute"])
    assert len(result.struck) == 3, describe(result)
    result.assert_exact(references.digest(), faults=3, steps=STEPS)
    assert redone(result)[2] == ALL, "what the survivors had sent was let go"


def test_a_result_that_not_all_have_is_computed_again_by_those_who_have_it_P3(
    jobs: Jobs, references: References
) -> None:
    fault = Fault(point="result_part", step=4, rank=1, occurrence=5)
    result = jobs.run(faults=[fault], options=["--hold", "recompute"])
    result.assert_exact(references.digest(), faults=1, steps=STEPS)
    assert redone(result)[4] == ALL
    (after,) = [line for line in entered(result, "w0") if line["lost"]]
    assert after["retried"] and after["again"] and set(after["again"]) | set(after["given"]) == set(ALL)
