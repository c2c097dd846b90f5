"""Fits under Lightning whose steps cannot be cut: a GAN that steps its optimizers itself, and data that is no one DataLoader.

Its last line says where the trainer ended, as JSON.
"""

import argparse
import faulthandler
import json
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--data", choices=["loader", "stream", "several", "reloaded"], default="stream")
parser.add_argument("--automatic", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--slow-until", type=Path, help="every batch takes longer until this file is there")
options = parser.parse_args()

faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()
warnings.simplefilter("ignore")


def wait_at(batch: int) -> None:
    """A worker that a test waits for comes before the end, on a slow machine, too."""
    deadline = time.monotonic() + (0.1 if batch < 12 else 8.0)
    while options.slow_until is not None and not options.slow_until.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


class Stream(IterableDataset[torch.Tensor]):
    """Draws random numbers on the way; its length is not known."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for place in range(40):
            yield torch.randn(2) + place / 40


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        samples = TensorDataset(torch.randn(40, 2, generator=torch.Generator().manual_seed(3)))
        if options.data == "stream":
            return DataLoader(Stream(), batch_size=4)
        if options.data == "several":
            return {
                "first": DataLoader(samples, batch_size=4, shuffle=True),
                "second": DataLoader(samples, batch_size=8),
            }
        epoch = self.trainer.current_epoch if self.trainer is not None else 0
        later: Any = [samples[place][0] + epoch for place in range(len(samples))]
        return DataLoader(later, batch_size=4, shuffle=True)


class Gan(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = options.automatic
        self.generator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        self.critic = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        wait_at(self.trainer.fit_loop.total_batch_idx)
        real = batch["first"][0] + batch["second"][0][:4] if isinstance(batch, dict) else batch
        if options.automatic:
            loss: torch.Tensor = (
                F.mse_loss(self.generator(torch.randn(len(real), 4)), real) + self.critic(real).square().mean()
            )
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss
        optimizers: Any = self.optimizers()
        steps_g, steps_c = optimizers
        fake = self.generator(torch.randn(len(real), 4))
        self.toggle_optimizer(steps_c)
        loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
        steps_c.zero_grad()
        self.manual_backward(loss)
        steps_c.step()
        self.untoggle_optimizer(steps_c)
        self.toggle_optimizer(steps_g)
        against = -self.critic(fake).mean()
        # Gradients of two batches: those of the first are in no optimizer and in no module.
        self.manual_backward(against)
        if batch_idx % 2:
            steps_g.step()
            steps_g.zero_grad()
        self.untoggle_optimizer(steps_g)
        self.log("against", against, on_step=True, on_epoch=True)
        return None

    def on_train_epoch_end(self) -> None:
        schedulers = self.lr_schedulers()
        if not options.automatic:
            for each in schedulers if isinstance(schedulers, list) else [schedulers]:
                each.step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        if options.automatic:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


pl.seed_everything(7)
trainer = pl.Trainer(
    accelerator="cpu",
    strategy="craft",
    max_epochs=options.epochs,
    reload_dataloaders_every_n_epochs=2 if options.data == "reloaded" else 0,
    accumulate_grad_batches=3 if options.automatic else 1,
    callbacks=[EMAWeightAveraging(decay=0.9)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Gan()
trainer.fit(module, datamodule=Data())
print(
    json.dumps(
        {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "batches": trainer.fit_loop.total_batch_idx + 1,
            "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
            "weights": float(sum(param.detach().double().abs().sum() for param in module.parameters())),
        }
    )
)
