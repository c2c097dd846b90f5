"""Two models that train against each other: two optimizers, several backward calls, bfloat16, a DataLoader."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import craft
from craft import testing

testing.arm()

torch.manual_seed(0)
maker = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 6))
judge = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, 1)).to(torch.bfloat16)
judge_optimizer = torch.optim.RMSprop(judge.parameters(), lr=1e-2)
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-2, amsgrad=True)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(maker_optimizer, patience=1, factor=0.5)
loader = DataLoader(
    TensorDataset(torch.randn(26, 6)), batch_size=12, shuffle=True, num_workers=1, collate_fn=lambda items: items
)

job = craft.join()
maker = job.replicate(maker)
judge = job.replicate(judge)
job.register(judge_optimizer=judge_optimizer, maker_optimizer=maker_optimizer, scheduler=scheduler)
for step in job.steps(loader, microbatches=7, epochs=3, seed=7):
    for samples in step:
        real = torch.stack([sample for (sample,) in samples])
        made = maker(torch.randn(len(real), 4))
        judged = judge(made.detach().bfloat16())
        F.softplus(judged).mean().backward()
        F.softplus(-judge(real.bfloat16())).mean().backward()
        if step.number % 2:
            for param in judge.parameters():
                param.requires_grad_(False)
            loss = F.softplus(-judge(made.bfloat16()).float()).mean()
            loss.backward()
            for param in judge.parameters():
                param.requires_grad_(True)
            step.log(loss=loss)
    judge_optimizer.step()
    maker_optimizer.step()
    if "loss" in step.metrics:
        scheduler.step(step.metrics["loss"])
