"""The same script as ``train_ddp.py``, as a job that survives the loss of its workers.

craft run --workers 4 examples/ddp/train_craft.py
"""

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

import craft

GLOBAL_BATCH = 256
EPOCHS = 3

job = craft.join()
torch.manual_seed(0)
inputs = torch.randn(5120, 32)
targets = (inputs[:, :8].sum(dim=1) > 0).long()
train = TensorDataset(inputs[:4096], targets[:4096])
validation = TensorDataset(inputs[4096:], targets[4096:])

model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 2))
model = job.replicate(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
job.register(optimizer=optimizer, scheduler=scheduler)


def score(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, y = batch
    output = model(x)
    return {"loss": F.cross_entropy(output, y), "accuracy": (output.argmax(dim=1) == y).float().mean()}


for epoch in job.epochs(EPOCHS, train, global_batch=GLOBAL_BATCH, microbatches=8, seed=0):
    for step in epoch:
        optimizer.zero_grad()
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.log(loss=loss)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    model.eval()
    scores = job.evaluate(validation, score, batch_size=256)
    model.train()
    if job.is_leader:
        print(f"epoch {epoch.number} loss {scores['loss']:.4f} accuracy {scores['accuracy']:.3f}")
    job.once("save", lambda: torch.save(model.state_dict(), "model.pt"))
