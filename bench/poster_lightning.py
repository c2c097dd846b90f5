"""The same training as a fit of Lightning's under ``strategy="craft"``; ``bench/poster.py`` starts it."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Batch, Samples, build_model, build_optimizer


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build_model()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        features, labels = batch
        return F.cross_entropy(self.net(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.net)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, required=True, help="samples of one microbatch")
    parser.add_argument("--accumulate", type=int, required=True, help="microbatches of one worker")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu", strategy="craft", max_steps=1_000_000, max_epochs=-1, gradient_clip_val=1.0,
        accumulate_grad_batches=args.accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Samples(), batch_size=args.samples, shuffle=True))


if __name__ == "__main__":
    main()
