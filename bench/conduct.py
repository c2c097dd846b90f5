"""How a benchmark of running jobs is conducted: in a folder of its own, up to its verdict."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.jobs import exit_on_sigterm
from bench.report import environment, finish


def conduct(name: str, args: argparse.Namespace, run: Callable[[argparse.Namespace, Path], dict[str, Any]]) -> int:
    """Run a benchmark in a folder that is gone afterwards, write its results under ``args.out``; return an exit status."""
    exit_on_sigterm()
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    result: dict[str, Any] = {"benchmark": name, "settings": settings, "environment": environment()}
    with tempfile.TemporaryDirectory(prefix="craft-bench-") as folder:
        result |= run(args, Path(folder))
    return finish(result, args.out)
