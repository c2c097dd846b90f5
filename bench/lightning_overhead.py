"""Measures what a failure-free step costs under Lightning: ``strategy="craft"`` against its own ``"ddp"``, over Gloo.

Fits under the one and the other take turns, so that the machine's drift meets both. The bar: the median over the turns of
(median step under craft / median step under ddp) is at most 1.03. Only a machine that does nothing else tells anything. Example:

    python bench/lightning_overhead.py --workers 2 --turns 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("lightning_fit.py")
BAR = 1.03


def run(strategy: str, args: argparse.Namespace, folder: Path) -> float:
    """Run one fit; return its median step in seconds."""
    out = folder / f"{strategy}.json"
    out.unlink(missing_ok=True)
    fit = [str(SCRIPT), "--strategy", strategy, "--workers", str(args.workers), "--steps", str(args.steps)]
    fit += ["--batch", str(args.batch), "--out", str(out)]
    begin = [sys.executable]
    if strategy == "craft":
        begin += ["-m", "craft.cli.main", "run", "--workers", str(args.workers)]
        begin += ["--dir", tempfile.mkdtemp(dir=folder) + "/run"]
    subprocess.run([*begin, *fit], check=True, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    spans: list[float] = json.loads(out.read_text())
    return statistics.median(spans)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128, help="samples of a worker's batch")
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            order = ("ddp", "craft") if turn % 2 == 0 else ("craft", "ddp")
            found = {strategy: run(strategy, args, Path(folder)) for strategy in order}
            ratios.append(found["craft"] / found["ddp"])
            print(
                f"ddp {found['ddp'] * 1e3:.1f} ms, craft {found['craft'] * 1e3:.1f} ms, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.3f}, bar {BAR}: {'met' if ratio <= BAR else 'MISSED'}")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
