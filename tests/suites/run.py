"""Runs frameworks' own test suites twice, with their own class and with CRAFT's; ``make suites`` calls it.

Each file with tests runs in a pytest of its own; what came out of each stays in ``<results>/<suite>/<own|craft>/``, one line
of JSON per test. See docs/reference/framework_tests.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.suites.suite import SUITES, Suite
from tests.suites.table import describe, judge, read_outcomes

PLUGINS = Path(__file__).parent / "plugins"
MODES = ("own", "craft")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    folders = {suite.name: os.environ.get(suite.variable) for suite in SUITES}
    chosen = [suite for suite in SUITES if folders[suite.name]]
    if not chosen:
        names = ", ".join(f"{suite.variable}=FOLDER" for suite in SUITES)
        print(
            f"nothing to run: name the folder of at least one suite ({names}); see docs/reference/framework_tests.md",
            file=sys.stderr,
        )
        return 2
    verdicts = []
    for suite in chosen:
        folder = Path(str(folders[suite.name])).resolve()
        files = [file for file in suite.files(folder) if options.only in str(file)]
        if not files:
            print(f"{suite.variable}={folder}: there are no files {', '.join(suite.patterns)}", file=sys.stderr)
            return 2
        found = {mode: [_run(suite, folder, file, mode, options) for file in files] for mode in MODES}
        outcomes = {mode: read_outcomes(found[mode]) for mode in MODES}
        verdicts.append(
            judge(suite.name, outcomes["own"], outcomes["craft"], suite.max_refused, left_out=suite.left_out)
        )
    text = describe(verdicts)
    (options.results / "table.txt").write_text(text + "\n")
    print(text)
    return 0 if all(each.is_good for each in verdicts) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(".suites"), help="where results stay (default: .suites)")
    parser.add_argument("--only", default="", help="run only files whose path contains this")
    parser.add_argument("-k", dest="keyword", default="", help="run only these tests, as pytest's -k")
    parser.add_argument(
        "--reuse", choices=("none", "own", "all"), default="none", help="take results that are there, instead of a run"
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="a test that takes longer is ended (default: 300)")
    options = parser.parse_args(arguments)
    options.results = options.results.resolve()
    return options


def _run(suite: Suite, folder: Path, file: Path, mode: str, options: argparse.Namespace) -> Path:
    """Run one file with tests; return where its results are."""
    name = "__".join(file.relative_to(folder).with_suffix("").parts)
    results: Path = options.results / suite.name / mode / f"{name}.jsonl"
    if results.exists() and options.reuse in (mode, "all"):
        return results
    results.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    # Written under another name first: results that are there are those of a run that came to its end.
    unfinished = results.with_suffix(".unfinished")
    root = folder.parents[suite.ups - 1] if suite.ups else folder
    plugins = ["suite_results", *filter(None, [suite.setting]), *([suite.plugin] if mode == "craft" else [])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "1", "-p", "no:timeout"]
    command += ["-p", "no:cacheprovider"]
    command += [each for plugin in plugins for each in ("-p", plugin)]
    command += [*(["-k", options.keyword] if options.keyword else []), str(file.relative_to(root))]
    environment = _environment(unfinished, options.limit_s, root)
    if mode == "craft" and suite.starts_processes:
        environment["SUITE_EVERYWHERE"] = suite.plugin
    with results.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=root, env=environment, stdout=log, stderr=log, check=False)
    if unfinished.exists():
        unfinished.rename(results)
    else:
        results.write_text("")
    print(f"{suite.name} {mode:<6}{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return results


def _environment(results: Path, limit_s: float, root: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PLUGINS), str(root), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "SUITE_RESULTS": str(results), "SUITE_TEST_LIMIT_S": str(limit_s)}
    # No suite is to wait for a network that may not be there.
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **own}


if __name__ == "__main__":
    sys.exit(main())
