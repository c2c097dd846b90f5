"""The training script that ``bench/recovery.py`` runs under ``craft run``: an ordinary loop."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import craft

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Ballast, Samples, backward, build_model, build_optimizer, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ballast-mb", type=int, default=0, help="further state, which only has to be carried along")
    args = parser.parse_args()

    torch.set_num_threads(1)
    job = craft.join()
    model = job.replicate(build_model())
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer, **({"ballast": Ballast(args.ballast_mb)} if args.ballast_mb else {}))
    global_batch = args.samples * args.microbatches
    for step in job.steps(
        Samples(), global_batch=global_batch, microbatches=args.microbatches, steps=args.steps, seed=0
    ):
        optimizer.zero_grad()
        for batch in step:
            backward(model, batch)
        update(model, optimizer)


if __name__ == "__main__":
    main()
