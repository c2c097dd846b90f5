"""Judge a disturbed job beside the undisturbed one. Pure: what the two left goes in, one word and a reason come out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["exact", "refused", "warned", "given up", "DIFFERENT", "HANG", "CRASH", "REFUSED"]
"""In capitals: findings. *warned*: another result, and a warning had named the mistake. *given up*: every worker was lost."""

ENDED = re.compile(r"^craft: ended with exit code (\d+): (.+)$", re.MULTILINE)
GIVEN_UP = 3
LIMITS = ("a job goes on from a checkpoint only in its first loop",)
"""What CRAFT cannot do, and says so: refused also where the script has no mistake."""
MIN_WORDS = 5
"""A sentence has at least so many."""


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    exit_code: int
    errors: str = ""
    """What it printed on standard output and error."""
    finals: Mapping[str, str] = field(default_factory=dict)
    """The fingerprint that each worker ended with."""
    steps: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What each step gave; several where workers printed different things."""
    warnings: tuple[str, ...] = ()
    """Lines of CRAFT's own in the workers' logs, and of ``craft run``."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the files of tensors that the script left."""
    violations: tuple[str, ...] = ()
    """Of P1 to P3, by the checker of histories."""
    hung: bool = False


@dataclass(frozen=True)
class Verdict:
    """One word, and why."""

    kind: Kind
    detail: str

    @property
    def finding(self) -> bool:
        """Whether something is wrong with CRAFT."""
        return self.kind.isupper()


def judge(reference: Outcome, disturbed: Outcome, *, mistake: str | None, says: str = "") -> Verdict:
    """Compare a disturbed run with the undisturbed one of the same script.

    A script with a ``mistake`` may be refused, with a sentence in which the pattern ``says`` is found.
    """
    for name, outcome in (("undisturbed", reference), ("disturbed", disturbed)):
        if outcome.hung:
            return Verdict("HANG", f"the {name} run did not end")
        if outcome.exit_code:
            return _ended_badly(name, outcome, mistake, says)
    found = [*_differences(reference, disturbed), *disturbed.violations]
    named = [line for line in disturbed.warnings if mistake and re.search(says, line, re.IGNORECASE)]
    if found and named and not disturbed.violations:
        return Verdict("warned", named[0])
    if found:
        return Verdict("DIFFERENT", "; ".join(found[:4]))
    return Verdict("exact", f"{len(reference.steps)} steps, final {', '.join(set(reference.finals.values()))}")


def _ended_badly(name: str, outcome: Outcome, mistake: str | None, says: str) -> Verdict:
    match = ENDED.search(outcome.errors)
    sentence = match[2] if match else (outcome.errors.strip().splitlines() or [""])[-1]
    if outcome.exit_code == GIVEN_UP and "no checkpoint to begin again from" in sentence:
        return Verdict("given up", sentence)
    if outcome.exit_code not in (1, 2):
        return Verdict("CRASH", f"the {name} run ended with exit code {outcome.exit_code}: {sentence}")
    if len(sentence.split()) < MIN_WORDS:
        return Verdict(
            "CRASH", f"the {name} run ended with exit code {outcome.exit_code} and no sentence: {sentence!r}"
        )
    if any(limit in sentence for limit in LIMITS):
        return Verdict("refused", sentence)
    if mistake is None:
        return Verdict("REFUSED", f"the {name} run of a script without a mistake was refused: {sentence}")
    if not re.search(says, sentence, re.IGNORECASE):
        return Verdict("CRASH", f"the {name} run was refused, and nothing of {says} is in: {sentence}")
    return Verdict("refused", sentence)


def _differences(reference: Outcome, disturbed: Outcome) -> list[str]:
    (expected,) = set(reference.finals.values())
    found = [
        f"{worker} ends with {final}, not {expected}" for worker, final in disturbed.finals.items() if final != expected
    ]
    if not disturbed.finals:
        found.append("no worker came to the end of the script")
    for step in sorted({*reference.steps, *disturbed.steps}):
        ours, theirs = reference.steps.get(step, ()), disturbed.steps.get(step, ())
        if ours != theirs:
            found.append(f"step {step} gave {' and '.join(theirs) or 'nothing'}, not {' and '.join(ours) or 'nothing'}")
            break
    for file, content in reference.files.items():
        if disturbed.files.get(file) != content:
            found.append(f"{file} has {disturbed.files.get(file, 'not been written')}, not {content}")
    return found
