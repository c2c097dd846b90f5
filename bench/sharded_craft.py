"""The training script that ``bench/sharded.py`` and ``bench/completion.py`` run under ``craft run``: an ordinary FSDP2 loop."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import craft

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import backward, build_optimizer, update
from bench.sharded_models import REPLICAS, SHARDS, Taught, build_sharded, save_shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one worker and step, if all are there")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    args = parser.parse_args()

    torch.set_num_threads(1)
    job = craft.join()
    model = job.replicate(build_sharded(job.mesh(shard=SHARDS)))
    optimizer = build_optimizer(model)
    job.register(optimizer=optimizer)
    global_batch = args.samples * REPLICAS * SHARDS
    for step in job.steps(
        Taught(), global_batch=global_batch, microbatches=args.microbatches, steps=args.steps, seed=0
    ):
        optimizer.zero_grad()
        for batch in step:
            backward(model, batch)
        update(model, optimizer)
    save_shard(model, args.out, job.rank_in_replica)


if __name__ == "__main__":
    main()
