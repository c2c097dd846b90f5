"""A fit of Lightning's that tells how long its steps took, for ``lightning_overhead.py``."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 512
_WARM_UP = 20


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Times(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    L.seed_everything(0)
    times = Times()
    trainer = L.Trainer(
        accelerator="cpu", strategy=args.strategy, devices=args.workers if args.strategy == "ddp" else 1,
        max_steps=args.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[times],
    )  # fmt: skip
    data = TensorDataset(torch.randn(4096, WIDTH), torch.randint(0, 10, (4096,)))
    trainer.fit(Module(), DataLoader(data, batch_size=args.batch, shuffle=True))
    if trainer.is_global_zero:
        spans = [
            after - before for before, after in zip(times.ends[_WARM_UP:], times.ends[_WARM_UP + 1 :], strict=False)
        ]
        args.out.write_text(json.dumps(spans))


if __name__ == "__main__":
    main()
