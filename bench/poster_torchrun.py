"""Checkpoint and restart as many do it: DistributedDataParallel under torchrun, and a save every so many steps.

``bench/poster.py`` starts it. Every rank begins from the newest save. Each step that is done becomes a line of a file, in
the form that CRAFT uses for its own ``steps.jsonl``; a generation is counted by torchrun's restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Samples, backward, build_model, build_optimizer, endless_batches, update

# The names that torch does not export by type.
dist: Any = torch.distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one worker's batch")
    parser.add_argument("--every", type=int, required=True, help="steps from save to save")
    parser.add_argument("--group-timeout-s", type=float, required=True, help="limit of one collective")
    parser.add_argument("--commits", type=Path, required=True, help="folder for commit lines, process ids and the save")
    args = parser.parse_args()

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    # A prefix for every start: torchrun's store still has the addresses of the workers before, where nobody listens now.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    place = {"store": dist.PrefixStore(f"start{generation}", store), "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **place)
    # Of its own, for the limit: workers may take longer than that to start.
    group = dist.new_group(timeout=timedelta(seconds=args.group_timeout_s))
    (args.commits / f"{rank}.pid").write_text(str(os.getpid()))
    inner = build_model()
    optimizer = build_optimizer(inner)
    step, save = 0, args.commits / "save.pt"
    if save.exists():
        state = torch.load(save)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DistributedDataParallel(inner, process_group=group)
    with (args.commits / f"{rank}.jsonl").open("a", buffering=1) as commits:
        for batch in endless_batches(Samples(), args.samples, rank, world_size):
            optimizer.zero_grad()
            backward(model, batch)
            update(model, optimizer)
            step += 1
            line = {"step": step, "time": time.time(), "generation": generation, "world_size": world_size}
            commits.write(json.dumps(line) + "\n")
            if step % args.every == 0 and rank == 0:
                state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, save.with_suffix(".part"))
                save.with_suffix(".part").rename(save)


if __name__ == "__main__":
    main()
