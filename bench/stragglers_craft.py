"""The training script that ``bench/stragglers.py`` runs: an ordinary loop, in which a microbatch may wait as for a device.

The device of a worker is three times as slow while there is a file of the worker's name.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import craft

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Samples, backward, build_model, build_optimizer, update

TIMES_AS_SLOW = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one microbatch")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--wait-ms", type=float, required=True, help="how long the device of a microbatch takes")
    parser.add_argument("--slow", type=Path, required=True, help="where the files are")
    args = parser.parse_args()

    torch.set_num_threads(1)
    job = craft.join()
    model = job.replicate(build_model())
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer)
    size = args.samples * args.microbatches
    for step in job.steps(Samples(), global_batch=size, microbatches=args.microbatches, steps=args.steps, seed=0):
        optimizer.zero_grad()
        for batch in step:
            if args.wait_ms:
                slow = TIMES_AS_SLOW if (args.slow / job.worker_id).exists() else 1
                time.sleep(args.wait_ms * slow / 1e3)
            backward(model, batch)
        update(model, optimizer)


if __name__ == "__main__":
    main()
