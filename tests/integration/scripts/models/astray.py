"""One worker's weights change behind everybody's back."""

import torch

import craft

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer)
for step in job.steps(torch.ones(6, 64), global_batch=6, microbatches=3, steps=60):
    for x in step:
        model(x).square().mean().backward()
    optimizer.step()
    if step.number == 7 and job.worker_id == "w2":
        with torch.no_grad():
            model.weight.view(-1)[4000] += 1e-6
