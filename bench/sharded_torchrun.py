"""Checkpoint and restart of a sharded model: torch's HSDP under torchrun, and a save every so many steps.

``bench/completion.py`` starts it. Each worker of the first replica saves its shard; all begin from the newest save whose shards
are all there. Each step that is done becomes a line of a file; a generation is counted by torchrun's restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import backward, build_optimizer, update
from bench.sharded_models import REPLICAS, SHARDS, Blocks, LocalState, Taught, build_sharded, mean_by_sum, save_shard

# The names that torch does not export by type.
dist: Any = torch.distributed


def newest(saves: Path) -> int:
    """Return the newest step of which all shards are saved, or 0."""
    whole = [path for path in saves.glob("step*") if len(list(path.glob("*.pt"))) == SHARDS]
    return max((int(path.name.removeprefix("step")) for path in whole), default=0)


def save(saves: Path, step: int, position: int, state: dict[str, Any]) -> None:
    """Write this worker's shard, which counts once it is whole."""
    folder = saves / f"step{step}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"{position}.part")
    (folder / f"{position}.part").rename(folder / f"{position}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one worker and step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps from save to save")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for commit lines, process ids, saves, the model"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    # A prefix for every start: torchrun's store still has the addresses of the workers before, where nothing listens now.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    place = {"store": dist.PrefixStore(f"start{generation}", store), "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **place)
    (args.out / f"{rank}.pid").write_text(str(os.getpid()))
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    replica, position = mesh.get_coordinate() or (0, 0)
    model = build_sharded(mesh)
    mean_by_sum(model)
    optimizer = build_optimizer(model)
    state = LocalState(model, optimizer)
    saves = args.out / "saves"
    found = torch.tensor(newest(saves))
    # Shards were saved by several workers: all have to see the same newest one.
    dist.all_reduce(found, dist.ReduceOp.MIN)
    step = int(found)
    if step:
        state.load(torch.load(saves / f"step{step}" / f"{position}.pt"))
    blocks = Blocks(Taught(), args.samples, world_size)
    with (args.out / f"{rank}.jsonl").open("a", buffering=1) as commits:
        while step < args.steps:
            optimizer.zero_grad()
            backward(model, blocks.batch(step, rank))
            update(model, optimizer)
            step += 1
            line = {"step": step, "time": time.time(), "generation": generation, "world_size": world_size}
            commits.write(json.dumps(line) + "\n")
            if step % args.every == 0 and replica == 0:
                save(saves, step, position, state.save())
    save_shard(model, args.out, position)


if __name__ == "__main__":
    main()
