"""One rank of a model that FSDP2 shards: ``sharded.py ACTION STORE RENDEZVOUS RANK SIZE [FULL]``.

``save``: steps 1 (as built), 2 (unchanged), 3 (half of it trained on) and 4 (trained on, in the background); FULL gets the
whole tensors of 4. ``load``: the newest, and FULL gets those again. ``die``: rank 1 is killed in the middle of a save.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from craft import dcp


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Shards of all sizes: some ranks have none of the smallest tensors."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 301), torch.nn.ReLU(), torch.nn.Linear(301, 256), torch.nn.Linear(256, 1)
    )
    for layer in (*model, model) if dist.is_initialized() else ():
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def whole(state: Any) -> Any:
    """A copy with whole tensors, which all ranks have to ask for."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    if isinstance(state, DTensor):
        state = state.full_tensor()
    return state.clone() if isinstance(state, torch.Tensor) else state


class Deadly(DefaultSavePlanner):
    """Ends its process in the middle of a save."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn.endswith("2.weight"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def main(action: str, store: str, rendezvous: str, rank: int, size: int, full: str = "") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    model, optimizer = build(1 if action == "load" else 0)
    train(model, optimizer)
    if action == "die":
        planner = Deadly() if rank == 1 else DefaultSavePlanner()
        save(state_of(model, optimizer), storage_writer=dcp.StorageWriter(store, 9), planner=planner)
    if action == "save":
        for step in (1, 2):
            save(state_of(model, optimizer), storage_writer=dcp.StorageWriter(store, step))
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        train(model, optimizer)
        save(state_of(model, optimizer), storage_writer=dcp.StorageWriter(store, 3))
        train(model, optimizer)
        saved = state_of(model, optimizer)
        kept = whole(saved)
        # A group of its own: it works while training goes on.
        group = dist.new_group(backend="gloo")
        future: Any = async_save(saved, storage_writer=dcp.StorageWriter(store, 4), process_group=group)
        # What happens next is not in it.
        train(model, optimizer)
        future.result()
    if action == "load":
        found = state_of(model, optimizer)
        load(found, storage_reader=dcp.StorageReader(store))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        kept = whole(state_of(model, optimizer))
    if rank == 0:
        torch.save(kept, full)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    action, store, rendezvous, rank, size, *more = sys.argv[1:]
    main(action, store, rendezvous, int(rank), int(size), *more)
