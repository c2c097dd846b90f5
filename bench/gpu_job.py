"""The training script that ``bench/gpu.py`` runs: a Llama in bfloat16 with AdamW, until it is told to stop.

Where jobs take turns, each trains as far as its file says, and tells at its end what it had of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import craft

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llama"))

from model import SIZES, Llama, Text, loss_of

LOOK_S = 0.0005
WARM_UP = 3
"""Steps after which memory is what it stays."""


def await_turn(job: craft.Job, upto: Path, done: int) -> None:
    """Wait until the file allows for more than ``done`` steps."""
    with job.paused("it is another job's turn"):
        while int(upto.read_text()) <= done:
            time.sleep(LOOK_S)


def memory(model: torch.nn.Module) -> dict[str, int]:
    """Bytes on the device between two steps and at most, of pinned memory of the host at most, and of a gradient."""
    torch.cuda.synchronize()
    return {
        "gradient": sum(param.numel() * param.element_size() for param in model.parameters()),
        "between": torch.cuda.memory_allocated(),
        "most": torch.cuda.max_memory_allocated(),
        "pinned": torch.cuda.host_memory_stats()["allocated_bytes.peak"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=1, help="of one microbatch")
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--stop", type=Path, help="when this file is there, the job ends")
    parser.add_argument("--upto", type=Path, help="the file that says how many steps may be done")
    args = parser.parse_args()

    job = craft.join()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    with job.device:
        model = Llama(SIZES[args.size], args.length, dropout=0.1).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model = job.replicate(model)
    job.register(optimizer=optimizer)
    data = Text(600, args.length, SIZES[args.size].tokens)
    batch = args.samples * args.microbatches
    for step in job.steps(data, global_batch=batch, microbatches=args.microbatches, steps=args.steps, seed=0):
        optimizer.zero_grad()
        for text in step:
            loss = loss_of(model, text.to(job.device, non_blocking=True))
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        if args.upto is not None:
            if step.number == WARM_UP:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            await_turn(job, args.upto, step.number + 1)
        if args.stop is not None and args.stop.exists():
            job.stop("it was told to")
    if args.upto is not None:
        print(json.dumps(memory(model)), flush=True)


if __name__ == "__main__":
    main()
