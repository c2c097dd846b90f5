"""The training script that ``bench/alerts.py`` runs: a worker falls asleep in a microbatch when a file of its name appears."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import craft

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Samples, backward, build_model, build_optimizer, update

ASLEEP_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one microbatch")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--beds", type=Path, required=True, help="where the files are")
    args = parser.parse_args()

    torch.set_num_threads(1)
    job = craft.join()
    model = job.replicate(build_model())
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer)
    size = args.samples * args.microbatches
    for step in job.steps(Samples(), global_batch=size, microbatches=args.microbatches, steps=1_000_000, seed=0):
        optimizer.zero_grad()
        for batch in step:
            if (args.beds / job.worker_id).exists():
                (args.beds / f"{job.worker_id}.asleep").touch()
                time.sleep(ASLEEP_S)
            backward(model, batch)
        update(model, optimizer)


if __name__ == "__main__":
    main()
