"""A small GAN with a loop of its own: two networks, two optimizers, two backward passes in a step."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
angles = torch.randint(8, (4096,)) * (torch.pi / 4)
ring = torch.stack([angles.cos(), angles.sin()], dim=1) * 2 + 0.05 * torch.randn(4096, 2)
loader = DataLoader(TensorDataset(ring), batch_size=256, shuffle=True, drop_last=True)

generator = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
discriminator = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.LeakyReLU(0.2), torch.nn.Linear(64, 1))
update_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
update_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
balance = {"lead": 0.0}  # how far the discriminator is ahead; what it learns from, it learns more slowly then

step = 0
while step < 100:
    for (real,) in loader:
        update_d.zero_grad()
        fake = generator(torch.randn(len(real), 8)).detach()
        loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
        loss_d.backward()
        for group in update_d.param_groups:
            group["lr"] = 1e-3 / (1 + max(0.0, balance["lead"]))
        update_d.step()

        update_g.zero_grad()
        loss_g = F.softplus(-discriminator(generator(torch.randn(len(real), 8)))).mean()
        loss_g.backward()
        update_g.step()

        balance["lead"] = 0.9 * balance["lead"] + 0.1 * (loss_g.item() - loss_d.item())
        step += 1
        if step % 25 == 0:
            print(f"step {step} discriminator {loss_d.item():.4f} generator {loss_g.item():.4f}")
        if step == 100:
            break
