"""One process of a torchft replica group: FSDP2 inside the group, torchft's manager across the groups.

``bench/sharded.py`` and ``bench/completion.py`` start the groups, each with a store, and start a group again when one of its
processes is lost. Limits are those of torchft's README and of the ``train_ddp.py`` it points to. The samples of a step
follow from its number, so that a step that is tried again skips none: what a group that is not there would have had is lost.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchft import Manager, Optimizer, ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import backward, build_optimizer, update
from bench.sharded_models import REPLICAS, SHARDS, Blocks, LocalState, Taught, build_sharded, mean_by_sum, save_shard

# The names that torch does not export by type.
dist: Any = torch.distributed


def wait_for_all(folder: Path, name: str) -> None:
    """Wait until every process of the job has a manager, or had one: else a group that is early would train alone."""
    (folder / f"{name}.ready").touch()
    while len(list(folder.glob("*.ready"))) < REPLICAS * SHARDS:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--position", type=int, required=True)
    parser.add_argument("--store-port", type=int, required=True, help="of the group's store; position 0 hosts it")
    parser.add_argument("--lighthouse", required=True, help="address of torchft_lighthouse")
    parser.add_argument("--samples", type=int, required=True, help="samples of one worker and step")
    parser.add_argument("--steps", type=int, required=True, help="train as many samples as so many whole steps have")
    parser.add_argument(
        "--group-timeout-ms", type=int, default=5000, help="limit of one collective (train_ddp.py: 5000)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for commit lines and the finished model")
    args = parser.parse_args()

    torch.set_num_threads(1)
    place = {"rank": args.position, "world_size": SHARDS}
    store = dist.TCPStore("localhost", args.store_port, is_master=args.position == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, **place)
    model = build_sharded(init_device_mesh("cpu", (SHARDS,), mesh_dim_names=("shard",)))
    mean_by_sum(model)
    inner = build_optimizer(model)
    state = LocalState(model, inner)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=args.group_timeout_ms)),
        load_state_dict=state.load,
        state_dict=state.save,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        store_addr="localhost",
        store_port=args.store_port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"bench_{args.group}",
        **place,
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_all_reduce_hook(lambda output: manager.allreduce(output).wait())
    optimizer = Optimizer(manager, inner)
    wait_for_all(args.out, f"{args.group}.{args.position}")
    blocks = Blocks(Taught(), args.samples, REPLICAS * SHARDS)
    with (args.out / f"{args.group}.{args.position}.jsonl").open("a", buffering=1) as commits:
        while manager.batches_committed() < args.steps * REPLICAS:
            before = manager.current_step()
            optimizer.zero_grad()
            backward(model, blocks.batch(before, args.group * SHARDS + args.position))
            update(model, optimizer)
            if manager.current_step() > before:
                line = {"step": manager.current_step(), "time": time.time(), "generation": manager._quorum_id}
                line |= {"world_size": manager.num_participants(), "batches": manager.batches_committed()}
                commits.write(json.dumps(line) + "\n")
    save_shard(model, args.out, args.position)
    # torchft's server threads would keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
