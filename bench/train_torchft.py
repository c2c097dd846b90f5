"""One torchft replica group of one worker: what ``bench/recovery.py`` starts, kills and times.

The settings are those of torchft's README and of the ``train_ddp.py`` it points to. Each commit becomes a line of a
file, in the form CRAFT uses for its own ``steps.jsonl``. A torchft generation is counted here by changes in the number
of participants.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Ballast, Samples, backward, build_model, build_optimizer, endless_batches, update


@dataclass(frozen=True)
class Replica:
    """The objects of a torchft training loop."""

    manager: Manager
    model: nn.Module
    optimizer: Optimizer
    store: object
    """The replica group's own store; it must live as long as the manager."""


def join_torchft(rank: int, lighthouse: str, group_timeout_ms: int = 5000, ballast_mb: int = 0) -> Replica:
    """Build model, optimizer and manager for a replica group of one worker."""
    ballast = Ballast(ballast_mb)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    model = build_model()
    inner = build_optimizer(model)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        ballast.load_state_dict(state["ballast"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict(), "ballast": ballast.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(milliseconds=group_timeout_ms)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"bench_{rank}",
    )
    return Replica(manager, DistributedDataParallel(manager, model), Optimizer(manager, inner), store)


def train(replica: Replica, next_batch: Callable[[], Any], record: Callable[[int, int], None]) -> None:
    """Train until killed; ``record(step, participants)`` is called after every commit."""
    manager = replica.manager
    while True:
        committed = manager.current_step()
        replica.optimizer.zero_grad()
        backward(replica.model, next_batch())
        update(replica.model, replica.optimizer)
        if manager.current_step() > committed:
            record(manager.current_step(), manager.num_participants())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")), help="default: RANK")
    parser.add_argument("--under-craft", action="store_true", help="as a guest of the CRAFT job that this worker is in")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--lighthouse", required=True, help="address of torchft_lighthouse")
    parser.add_argument("--samples", type=int, required=True, help="samples of one worker's batch")
    parser.add_argument(
        "--group-timeout-ms", type=int, default=5000, help="limit of one collective (train_ddp.py: 5000)"
    )
    parser.add_argument("--ballast-mb", type=int, default=0, help="further state, which only has to be carried along")
    parser.add_argument("--commits", type=Path, required=True, help="folder for this rank's commit lines")
    args = parser.parse_args()

    torch.set_num_threads(1)
    batches = endless_batches(Samples(), args.samples, args.rank, args.workers)
    replica = join_torchft(args.rank, args.lighthouse, args.group_timeout_ms, args.ballast_mb)
    generation, world_size = 0, 0
    name = str(args.rank)
    if args.under_craft:
        from craft.adapters.torchft import attend

        name = attend(replica.manager, lighthouse=args.lighthouse).worker_id

    with (args.commits / f"{name}.jsonl").open("a", buffering=1) as commits:

        def record(step: int, participants: int) -> None:
            nonlocal generation, world_size
            generation += participants != world_size
            world_size = participants
            line = {"step": step, "time": time.time(), "generation": generation, "world_size": world_size}
            commits.write(json.dumps(line) + "\n")

        train(replica, lambda: next(batches), record)


if __name__ == "__main__":
    main()
