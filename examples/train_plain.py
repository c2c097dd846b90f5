"""A plain PyTorch training script, for one process. Beside it, ``train_craft.py`` shows exactly what changes."""

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(4096, 32)
targets = (inputs[:, :8].sum(dim=1) > 0).long()
dataset = TensorDataset(inputs, targets)

model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

step = 0
while step < 200:
    for x, y in DataLoader(dataset, batch_size=256, shuffle=True, drop_last=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step == 200:
            break
