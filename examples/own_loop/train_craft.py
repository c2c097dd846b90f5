"""The same script as ``train_plain.py``, as a job that survives the loss of its workers; its loop stays its own.

craft run --workers 4 examples/own_loop/train_craft.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import craft

torch.manual_seed(0)
angles = torch.randint(8, (4096,)) * (torch.pi / 4)
ring = torch.stack([angles.cos(), angles.sin()], dim=1) * 2 + 0.05 * torch.randn(4096, 2)
loader = DataLoader(TensorDataset(ring), batch_size=256, shuffle=True, drop_last=True)

generator = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
discriminator = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.LeakyReLU(0.2), torch.nn.Linear(64, 1))
update_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
update_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
balance = {"lead": 0.0}  # how far the discriminator is ahead; what it learns from, it learns more slowly then

job = craft.join()
job.replicate(generator)
job.replicate(discriminator)
job.register(update_g=update_g, update_d=update_d)
job.register_state(save=lambda: dict(balance), load=balance.update)

for attempt in job.attempts(loader, microbatches=8, steps=100, seed=0):
    with attempt:
        for (real,) in attempt.microbatches(discriminator.parameters()):
            fake = generator(torch.randn(len(real), 8)).detach()
            loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
            loss_d.backward()
            attempt.log(loss_d=loss_d)
        for group in update_d.param_groups:
            group["lr"] = 1e-3 / (1 + max(0.0, balance["lead"]))
        update_d.step()

        for (real,) in attempt.microbatches(generator.parameters()):
            loss_g = F.softplus(-discriminator(generator(torch.randn(len(real), 8)))).mean()
            loss_g.backward()
            attempt.log(loss_g=loss_g)
        update_g.step()

        means = attempt.metrics
        balance["lead"] = 0.9 * balance["lead"] + 0.1 * (means["loss_g"] - means["loss_d"])
    if attempt.committed and job.step % 25 == 0 and job.is_leader:
        print(f"step {job.step} discriminator {means['loss_d']:.4f} generator {means['loss_g']:.4f}")
