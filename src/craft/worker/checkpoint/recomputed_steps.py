"""Compare recomputed steps with their earlier results.

A job that lost every worker restarts from a checkpoint. It recomputes the steps since, from the same state and data, so their
metrics must equal those in ``metrics.jsonl``. If they differ, the script keeps state that is in no checkpoint. Input: the file,
when the job restarts, and each committed step. Output: nothing, or ``BitsDiffer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from craft.protocol.errors import BitsDiffer
from craft.telemetry.records.metric_lines import read_metrics

NOT_METRICS = ("step", "branch", "time")
LOOK_FOR = (
    "the script changes something in its loop that is in no checkpoint (a counter, a torch.Generator of the script, an attribute"
    " such as a dropout rate, a moving average). Register it (job.register, job.register_state), or set it from step.number in"
    " every step"
)


class RecomputedSteps:
    """The first results of the steps from one on."""

    def __init__(self, expected: Mapping[int, Mapping[str, Any]]) -> None:
        self._expected = dict(expected)
        self._last = max(self._expected, default=-1)

    @classmethod
    def read(cls, path: Path, first: int) -> RecomputedSteps:
        """Read the steps from ``first`` on from a ``metrics.jsonl``; of a repeated step, the newest line."""
        lines = {line["step"]: line for line in read_metrics(path) if line["step"] >= first}
        return cls({step: _values(line) for step, line in lines.items()})

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise BitsDiffer if ``step`` gave other metrics before."""
        if step > self._last or (expected := self._expected.pop(step, None)) is None:
            return
        # Through JSON, like the expected values: it turns non-finite numbers into null.
        found = _values(msgspec.json.decode(msgspec.json.encode(dict(metrics))))
        names = [name for name in expected if name in found]
        # One match is enough: a script may also log times and rates, which always differ.
        if not names or any(expected[name] == found[name] for name in names):
            return
        name = names[0]
        raise BitsDiffer(
            f"step {step} was computed again after the job began again from a checkpoint, and gave {name} {found[name]}"
            f" instead of {expected[name]}: {LOOK_FOR}. --no-check-bits lets the job go on"
        )


def _values(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in NOT_METRICS}
