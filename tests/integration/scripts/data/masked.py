"""Steps in which every token is masked: they weigh nothing, and their loss is a mean over nothing. One is the last."""

import torch
import torch.nn.functional as F

import craft
from craft import testing

testing.arm()
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
data = [(torch.randn(4), number % 3) for number in range(24)]
for step in job.steps(data, global_batch=12, microbatches=4, steps=6):
    optimizer.zero_grad()
    for x, y in step:
        y = torch.full_like(y, -100) if step.number in (2, 5) else y
        step.weight((y != -100).sum())
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
print(f"ended after {job.step} steps")
