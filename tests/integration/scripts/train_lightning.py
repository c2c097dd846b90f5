"""A small job under Lightning, with all that people use: dropout, batch norm, clipping, accumulation, two schedulers, validation
within epochs, checkpoints of Lightning's own, logging to a file.

Its last line says where the trainer ended, as JSON. Package, strategy and precision are arguments.
"""

import argparse
import faulthandler
import importlib
import json
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--package", default="lightning.pytorch")
parser.add_argument("--strategy", default="craft")
parser.add_argument("--accelerator", default="cpu")
parser.add_argument("--precision", default="32-true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, default=-1)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--patience", type=int, help="stop early, once val_loss has not become smaller for so long")
parser.add_argument("--slow-until", type=Path, help="every microbatch takes longer until this file is there")
parser.add_argument("--slow-s", type=float, default=0.2, help="how much longer")
options = parser.parse_args()

faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()
warnings.simplefilter("ignore")
pl: Any = importlib.import_module(options.package)
CALLBACKS: Any = importlib.import_module(f"{options.package}.callbacks")
LOGGERS: Any = importlib.import_module(f"{options.package}.loggers")


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws random numbers for every sample, as augmentation does."""

    def __init__(self, number: int) -> None:
        self._inputs = torch.randn(number, 16, generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self._inputs[index]
        return sample + 0.1 * torch.randn(16), (sample[:4].sum() > 0).long()


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.last = torch.nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.norm(F.relu(self.first(x))), 0.2, self.training)
        return self.last(hidden)  # type: ignore[no-any-return]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        if options.slow_until is not None and not options.slow_until.exists():
            # Whoever a test waits for comes before the end, on however slow a machine.
            time.sleep(options.slow_s if self.global_step < 12 else 4 * options.slow_s)
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if x.abs().max() > 3.9:
            # One sample has that: one microbatch of an epoch logs it, on one of the workers.
            self.log("outlier_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.log("val_loss", F.cross_entropy(output, y), sync_dist=True)
        self.log("val_acc", (output.argmax(dim=1) == y).float().mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.log("grad_norm", torch.stack([torch.zeros((), device=self.device), *norms]).norm())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches
        every_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=int(total) + 1)
        return [optimizer], [{"scheduler": every_step, "interval": "step"}]


class Steps(CALLBACKS.Callback):  # type: ignore[misc]
    """Has a state of its own, which follows the job."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


pl.seed_everything(7)
best = CALLBACKS.ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{step}")
steps = Steps()
callbacks = [best, steps, CALLBACKS.LearningRateMonitor("step")]
if options.patience is not None:
    callbacks.append(CALLBACKS.EarlyStopping("val_loss", patience=options.patience))
trainer = pl.Trainer(
    accelerator=options.accelerator,
    deterministic=options.accelerator != "cpu",
    strategy=options.strategy,
    precision=options.precision,
    max_epochs=options.epochs,
    max_steps=options.steps,
    accumulate_grad_batches=options.accumulate,
    gradient_clip_val=0.5,
    val_check_interval=0.5,
    callbacks=callbacks,
    logger=LOGGERS.CSVLogger("logs"),
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, DataLoader(Noisy(320), batch_size=4, shuffle=True), DataLoader(Noisy(64), batch_size=16))
print(
    json.dumps(
        {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "seen": steps.seen,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
            "best": Path(best.best_model_path).name,
            "weights": float(sum(param.detach().double().abs().sum() for param in module.parameters())),
        }
    )
)
