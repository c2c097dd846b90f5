"""A small network on made-up data, with DistributedDataParallel: torchrun --standalone --nproc-per-node 2 train_plain.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(0)
inputs = torch.randn(2048, 32)
dataset = TensorDataset(inputs, (inputs[:, :8].sum(dim=1) > 0).long())

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 2))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=128 // dist.get_world_size(), sampler=sampler)

for epoch in range(6):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
dist.destroy_process_group()
