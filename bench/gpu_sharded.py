"""The failure-free step of CRAFT's sharded replicas on a GPU against torch's own HSDP: NCCL on both sides, one GPU for all.

``python -m bench.gpu_sharded --out DIR``. Two sets of four processes train in turns, see ``bench/sharded_overhead.py``. Each
process counts as a host for NCCL, so that both sides talk over the loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sharded_models import shard_bytes
from bench.sharded_overhead import SIDES, run_pair
from bench.stats import paired_ratio, ratio_of_means

LIMIT = 1.05
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_NET_CHUNKSIZE": str(1 << 20)}
"""The same for both sides; CRAFT sets the last one itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--samples", type=int, default=256, help="of one worker and step")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps-per-block", type=int, default=10)
    parser.add_argument("--nccl", nargs="*", default=[], help="more variables of NCCL, as NAME=VALUE")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.step_ms, args.device = 1000.0, "cuda:0"
    os.environ.update(NCCL | dict(each.split("=", 1) for each in args.nccl))
    with tempfile.TemporaryDirectory() as folder:
        found = run_pair(args, Path(folder), args.pairs, args.samples, args.width)
    steps = args.pairs * args.steps_per_block
    means = {side: 1e3 * sum(each[side] for each in found["blocks"]) / steps for side in SIDES}
    ratio = paired_ratio([(each["craft"], each["hsdp"]) for each in found["blocks"]], ratio_of_means)
    more = (max(found["peaks"]["craft"]) - max(found["peaks"]["hsdp"])) / shard_bytes(args.width, args.depth)
    what = f"{args.depth} layers of {args.width}, {args.samples} samples per worker"
    print(f"{what}: HSDP {means['hsdp']:.1f} ms, CRAFT {means['craft']:.1f} ms")
    print(
        f"ratio {ratio.value:.3f} (95% {ratio.low:.3f}-{ratio.high:.3f}; bar {LIMIT}); memory {more:+.2f} gradient shards"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_sharded.json").write_text(json.dumps({**found, "means_ms": means, "ratio": asdict(ratio)}))
    sys.exit(ratio.high > LIMIT)


if __name__ == "__main__":
    main()
