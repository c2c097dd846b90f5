"""What came out of a suite with the framework's own class and with CRAFT's, side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PASSED, REFUSED, FAILED = "passed", "refused", "failed"
BOTH = "not with its own class either"
"""Skipped or failed without CRAFT: says nothing about it."""


@dataclass(frozen=True)
class Outcome:
    """Of one test, in one run."""

    outcome: str
    why: str = ""


def read_outcomes(files: Iterable[Path]) -> dict[str, Outcome]:
    """By test, what the plugin wrote."""
    found = {}
    for file in files:
        for line in file.read_text().splitlines():
            test = json.loads(line)
            found[test["test"]] = Outcome(test["outcome"], test["why"])
    return found


def compare(own: Mapping[str, Outcome], craft: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """By test, what it says about CRAFT: passed, refused, failed, or nothing."""
    found = {}
    for test, expected in own.items():
        got = craft.get(test, Outcome(FAILED, "it did not run"))
        if expected.outcome != PASSED:
            found[test] = Outcome(BOTH, expected.why)
        elif got.outcome in (PASSED, REFUSED):
            found[test] = got
        else:
            found[test] = Outcome(FAILED, got.why or got.outcome)
    return found


@dataclass(frozen=True)
class Verdict:
    """What a suite says, and whether that is good enough."""

    name: str
    own: Counter[str]
    craft: Counter[str]
    refused: Counter[str]
    """By sentence."""
    failures: dict[str, str]
    """By test, why."""
    max_refused: float
    left_out: Mapping[str, str]
    """By file or test, why."""

    @property
    def counted(self) -> int:
        return self.craft[PASSED] + self.craft[REFUSED] + self.craft[FAILED]

    @property
    def refused_part(self) -> float:
        return self.craft[REFUSED] / self.counted if self.counted else 0.0

    @property
    def is_good(self) -> bool:
        return bool(self.counted) and not self.failures and self.refused_part <= self.max_refused


def judge(
    name: str,
    own: Mapping[str, Outcome],
    craft: Mapping[str, Outcome],
    max_refused: float,
    *,
    left_out: Mapping[str, str],
) -> Verdict:
    """Compare the two runs of a suite; tests that are left out count on neither side."""
    own = {test: outcome for test, outcome in own.items() if not _is_any_of(test, left_out)}
    compared = compare(own, craft)
    return Verdict(
        name=name,
        own=Counter(each.outcome for each in own.values()),
        craft=Counter(each.outcome for each in compared.values()),
        refused=Counter(each.why for each in compared.values() if each.outcome == REFUSED),
        failures={test: each.why for test, each in compared.items() if each.outcome == FAILED},
        max_refused=max_refused,
        left_out=left_out,
    )


def _is_any_of(test: str, names: Iterable[str]) -> bool:
    """Whether one of ``names`` is that of a test; pytest's own begins above the folder of the suite."""
    return any(f"/{test}".endswith(f"/{name}") for name in names)


def describe(verdicts: Iterable[Verdict]) -> str:
    """The table, what was left out and why, the sentences of refusals, and the failures by name."""
    lines = [
        f"{'suite':<14}{'own: passed':>12}{'failed':>8}{'skipped':>9}   "
        f"{'CRAFT: passed':>13}{'refused':>9}{'failed':>8}   refused"
    ]
    notes: list[str] = []
    for each in verdicts:
        lines.append(
            f"{each.name:<14}{each.own[PASSED]:>12}{each.own[FAILED]:>8}{each.own['skipped']:>9}   "
            f"{each.craft[PASSED]:>13}{each.craft[REFUSED]:>9}{each.craft[FAILED]:>8}   "
            f"{each.refused_part:.1%} (at most {each.max_refused:.0%}) {'ok' if each.is_good else 'NOT OK'}"
        )
        notes += [f"{each.name}: left out: {test}: {why}" for test, why in each.left_out.items()]
        notes += [f"{each.name}: refused {count} x: {sentence}" for sentence, count in each.refused.most_common()]
        notes += [f"{each.name}: FAILED {test}: {_first_line(why)}" for test, why in sorted(each.failures.items())]
    return "\n".join([*lines, "", *notes]) if notes else "\n".join(lines)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
