"""The same script as ``train_plain.py``, as a job that survives the loss of its workers.

craft run --workers 4 examples/train_craft.py
"""

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

import craft

torch.manual_seed(0)
inputs = torch.randn(4096, 32)
targets = (inputs[:, :8].sum(dim=1) > 0).long()
dataset = TensorDataset(inputs, targets)

model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer, scheduler=scheduler)
for step in job.steps(dataset, global_batch=256, microbatches=16, steps=200, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.log(loss=loss)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if job.step % 50 == 0 and job.is_leader:
        print(f"step {job.step} loss {step.metrics['loss']:.4f}")
