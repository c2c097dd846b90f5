"""The training script that ``bench/techniques.py`` runs: writes down what each step cost this worker in processor time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import craft

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import NUM_CLASSES, NUM_FEATURES, Samples, backward, build_optimizer, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one microbatch")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True, help="steps that do not count")
    parser.add_argument("--hidden", type=int, required=True, help="width of the model's only hidden layer")
    parser.add_argument("--costs", type=Path, required=True, help="folder for a file of each worker")
    args = parser.parse_args()

    torch.set_num_threads(1)
    job = craft.join()
    torch.manual_seed(0)
    layers = (torch.nn.Linear(NUM_FEATURES, args.hidden), torch.nn.GELU(), torch.nn.Linear(args.hidden, NUM_CLASSES))
    model = job.replicate(torch.nn.Sequential(*layers))
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer)
    size = args.samples * args.microbatches
    began = 0.0
    for step in job.steps(Samples(), global_batch=size, microbatches=args.microbatches, steps=args.steps, seed=0):
        if step.number == args.warm_up:
            # Of all threads of this process: what writes checkpoints and what reports counts, too.
            began = time.process_time()
        optimizer.zero_grad()
        for batch in step:
            backward(model, batch)
        update(model, optimizer)
    spent = (time.process_time() - began) / (args.steps - args.warm_up)
    (args.costs / job.worker_id).write_text(json.dumps(spent))


if __name__ == "__main__":
    main()
