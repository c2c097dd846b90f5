"""A small contrastive model: two encoders, whose embeddings of a pair are to be closest within the whole batch."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

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


model = Pairs()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

step = 0
while step < 100:
    for x, y in loader:
        optimizer.zero_grad()
        loss = model.loss(model.picture(x), model.caption(y))
        loss.backward()
        optimizer.step()
        step += 1
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        if step == 100:
            break
