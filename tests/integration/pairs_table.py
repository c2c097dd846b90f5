"""Makes docs/reference/technique_pairs.md from what ``test_pairs.py`` left behind; ``make pairs`` calls it."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from tests.integration.pairs import PARTS

from craft.decide.techniques import BUILT_IN

HEAD = """# All pairs of techniques

Every two built-in techniques, together in one job of 4 workers and under the faults that they answer, with everything
else switched off that can be. Made by `make pairs` from a run of `tests/integration/test_pairs.py`; each entry is a
job with real processes and signals.

**exact**: both did their part, and the training state at the end has the bits of an undisturbed run (P1), every
sample is in exactly one committed step (P2), no two workers had different states of a step (P3). The number is that
of workers lost on the way. A job that made room was resumed, and its end compared. `membership` is part of all of
them. `gpu_health` is not in the table: it needs a GPU to show itself.
"""


def main() -> int:
    folder, page = map(Path, sys.argv[1:3])
    found = {frozenset(each["pair"]): each for file in folder.glob("*.json") for each in [json.loads(file.read_text())]}
    missing = [pair for pair in itertools.combinations(PARTS, 2) if frozenset(pair) not in found]
    names = [kind.name for kind in BUILT_IN if kind.name in PARTS]
    lines = ["| | " + " | ".join(names[:-1]) + " |", "|---" * len(names) + "|"]
    for row, name in enumerate(names[1:], start=1):
        cells = [_cell(found.get(frozenset((name, other)))) if at < row else "" for at, other in enumerate(names[:-1])]
        lines.append(f"| **{name}** | " + " | ".join(cells) + " |")
    page.write_text(f"{HEAD}\n" + "\n".join(lines) + "\n")
    for pair in missing:
        print(f"not shown to work: {' and '.join(pair)}", file=sys.stderr)
    return 1 if missing else 0


def _cell(each: dict[str, int] | None) -> str:
    return "FAILED" if each is None else f"exact, {each['faults']}"


if __name__ == "__main__":
    sys.exit(main())
