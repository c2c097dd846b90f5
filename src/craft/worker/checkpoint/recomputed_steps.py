"""Compare steps that are computed a second time with what they gave before.

A job that lost every worker begins again from a checkpoint. The steps since that one are computed once more, from the same
state and with the same data, so that their metrics must be those that ``metrics.jsonl`` has. Where they are not, the script
keeps something that is in no checkpoint. Enters: the file, as the job begins again, and each committed step. Leaves: nothing,
or ``BitsDiffer``.
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
    """What the steps from one on gave the first time."""

    def __init__(self, expected: Mapping[int, Mapping[str, Any]]) -> None:
        self._expected = dict(expected)
        self._last = max(self._expected, default=-1)

    @classmethod
    def read(cls, path: Path, first: int) -> RecomputedSteps:
        """Take the steps from ``first`` on from a ``metrics.jsonl``; of a step that is there twice, the newest line."""
        lines = {line["step"]: line for line in read_metrics(path) if line["step"] >= first}
        return cls({step: _values(line) for step, line in lines.items()})

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise BitsDiffer if ``step`` gave something else before."""
        if step > self._last or (expected := self._expected.pop(step, None)) is None:
            return
        # By way of JSON, as the expected ones came: a number that is not finite is null there.
        found = _values(msgspec.json.decode(msgspec.json.encode(dict(metrics))))
        names = [name for name in expected if name in found]
        # One that agrees is enough: a script may log times and rates, too, which differ whenever they are measured.
        if not names or any(expected[name] == found[name] for name in names):
            return
        name = names[0]
        raise BitsDiffer(
            f"step {step} was computed again after the job began again from a checkpoint, and gave {name} {found[name]}"
            f" instead of {expected[name]}: {LOOK_FOR}. --no-check-bits lets the job go on"
        )


def _values(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in NOT_METRICS}
