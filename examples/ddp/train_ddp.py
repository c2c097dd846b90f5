"""A classifier on made-up data with DistributedDataParallel. Beside it, ``train_craft.py`` shows exactly what changes.

torchrun --standalone --nproc-per-node 4 examples/ddp/train_ddp.py
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 256
ACCUMULATION = 2
EPOCHS = 3

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(5120, 32)
targets = (inputs[:, :8].sum(dim=1) > 0).long()
train = TensorDataset(inputs[:4096], targets[:4096])
validation = TensorDataset(inputs[4096:], targets[4096:])

model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=GLOBAL_BATCH // world_size // ACCUMULATION, sampler=sampler)
validation_sampler = DistributedSampler(validation, shuffle=False)
validation_loader = DataLoader(validation, batch_size=256, sampler=validation_sampler)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for number, (x, y) in enumerate(loader):
        last = (number + 1) % ACCUMULATION == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y) / ACCUMULATION
            loss.backward()
        if last:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model.eval()
    totals = torch.zeros(2)
    with torch.no_grad():
        for x, y in validation_loader:
            output = model(x)
            totals += torch.tensor([F.cross_entropy(output, y, reduction="sum"), (output.argmax(dim=1) == y).sum()])
    dist.all_reduce(totals)
    loss, accuracy = (totals / len(validation)).tolist()
    model.train()
    if rank == 0:
        print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.3f}")
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()
dist.destroy_process_group()
