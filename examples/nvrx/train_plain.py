"""A small network on made-up data, restarted in-process by nvidia-resiliency-ext: ft_launcher train_plain.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.health_check import FaultCounter
from torch.nn.parallel import DistributedDataParallel

STEPS = 200
CHECKPOINT = "checkpoint.pt"


@inprocess.Wrapper(
    abort=AbortTorchDistributed(),
    health_check=FaultCounter(max_rank_faults=3),
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = dist.PrefixStore(f"iteration{call_wrapper.iteration}", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    replicated = DistributedDataParallel(model)
    for step in range(first, STEPS):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * world_size + rank))
        optimizer.zero_grad()
        loss = F.cross_entropy(replicated(x), x[:, :4].argmax(dim=1))
        loss.backward()
        optimizer.step()
        call_wrapper.ping()
        if rank == 0 and (step + 1) % 10 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "new.pt")
            os.replace("new.pt", CHECKPOINT)
    print(f"rank {rank} of {world_size}: loss {loss:.4f} after {STEPS} steps, iteration {call_wrapper.iteration}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
