"""The same script as ``train_plain.py``, as a job that survives the loss of its workers, whoever starts them.

craft lighthouse --workers 4 --dir run --port 29400
CRAFT_LIGHTHOUSE=http://127.0.0.1:29400 CRAFT_TOKEN_FILE=run/token \
    PYTHONHASHSEED=0 torchrun --standalone --nproc-per-node 4 --max-restarts 10 train_craft.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import craft

torch.manual_seed(0)
inputs = torch.randn(2048, 32)
dataset = TensorDataset(inputs, (inputs[:, :8].sum(dim=1) > 0).long())

job = craft.join()
net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 2))
model = job.replicate(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job.register(optimizer=optimizer)

for step in job.steps(dataset, global_batch=128, microbatches=8, epochs=6, seed=0):
    optimizer.zero_grad()
    for x, y in step:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    if job.step % 16 == 0 and job.is_leader:
        print(f"epoch {job.epoch} loss {step.metrics['loss']:.4f}")
