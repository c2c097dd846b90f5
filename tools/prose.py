"""Check the prose: the README is short, pages avoid some words, and the files that they name exist.

python tools/prose.py           # README.md, CONTRIBUTING.md, CHANGELOG.md and docs/
python tools/prose.py --src     # src/craft and the pages that are made from it, too
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_README_LINES = 150
AVOIDED = re.compile(r"\b(whoever|nobody|somebody|of its own|is no news)\b", re.IGNORECASE)
_FILE = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|txt|toml|svg|sh))`")
MADE = "<!-- Made by"
"""The first words of a page that tools/reference.py makes from the code."""


def pages() -> Iterator[Path]:
    """Yield the pages that people write."""
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        if not page.read_text().startswith(MADE):
            yield page


def sources() -> Iterator[Path]:
    """Yield the code, and the pages that are made from it."""
    yield from sorted((ROOT / "src" / "craft").rglob("*.py"))
    yield from (page for page in sorted((ROOT / "docs").rglob("*.md")) if page.read_text().startswith(MADE))


def findings(path: Path) -> Iterator[str]:
    """Yield each avoided word of a file, with its line; blocks of code on a page show what programs print."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced:
            continue
        for match in AVOIDED.finditer(line):
            yield f"{path.relative_to(ROOT)}:{number}: avoid {match[0]!r}: say who acts"


def missing_files(page: Path) -> Iterator[str]:
    """Yield each file of the project that a page names by its path and that is not there."""
    starts = (ROOT, ROOT / "src" / "craft", ROOT / "docs")
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        for name in _FILE.findall(line):
            # A path whose first folder is not ours is one of another project.
            ours = [start for start in starts if (start / name.partition("/")[0]).is_dir()]
            if ours and not any((start / name).exists() for start in ours):
                yield f"{page.relative_to(ROOT)}:{number}: there is no {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--src", action="store_true", help="look at src/craft and generated pages, too")
    options = parser.parse_args()
    found = [each for page in pages() for each in (*findings(page), *missing_files(page))]
    if options.src:
        found += [each for path in sources() for each in findings(path)]
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > MOST_README_LINES:
        found.append(f"README.md: {lines} lines, {MOST_README_LINES} at most: move something to docs/")
    print("\n".join(found) or "prose: nothing to mend")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
