"""A small network on made-up data, trained with torchft: RANK=0 python train_plain.py, RANK=1 python train_plain.py, ..."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS = int(os.environ.get("STEPS", "200"))

if __name__ == "__main__":
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def load_state_dict(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"train_{rank}",
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    chance = torch.Generator().manual_seed(rank)
    while manager.current_step() < STEPS:
        x = torch.randn(16, 16, generator=chance)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(dim=1))
        loss.backward()
        optimizer.step()
    print(f"loss {float(loss):.4f} after {manager.current_step()} steps")
    manager.shutdown(wait=False)
