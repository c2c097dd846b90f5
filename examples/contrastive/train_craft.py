"""The same script as ``train_plain.py``, as a job that survives the loss of its workers; its loss is that of the whole batch.

craft run --workers 4 examples/contrastive/train_craft.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import craft

torch.manual_seed(0)
meanings = torch.randn(2048, 8)
pictures, captions = meanings @ torch.randn(8, 32), (meanings @ torch.randn(8, 16)).sin()
loader = DataLoader(TensorDataset(pictures, captions), batch_size=128, shuffle=True, drop_last=True)


class Pairs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picture = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
        self.caption = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
        self.log_scale = torch.nn.Parameter(torch.tensor(1.0))

    def loss(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        logits = self.log_scale.exp() * F.normalize(left) @ F.normalize(right).t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


job = craft.join()
model = job.replicate(Pairs())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
job.register(optimizer=optimizer)

for step in job.steps(loader, microbatches=8, steps=100, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        loss = model.loss(step.gather(model.picture(x)), step.gather(model.caption(y)))
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    if job.is_leader and job.step % 20 == 0:
        print(f"step {job.step} loss {step.metrics['loss']:.3f}", flush=True)
