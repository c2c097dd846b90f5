"""Lightning's own ``ddp`` with ``CraftCallback``, under ``craft run``; goes on from the newest checkpoint."""

import argparse
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from craft.adapters.lightning import CraftCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--saved", type=Path, required=True)
parser.add_argument("--hang-at", type=int, help="the step in which rank 1 hangs, the first time")
parser.add_argument("--dies-before", action="store_true", help="rank 1 dies before all have met, the first time")
args = parser.parse_args()
warnings.simplefilter("ignore")


def say(**what: Any) -> None:
    print(json.dumps({**what, "time": time.time()}), flush=True)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        # Whatever a test does to it comes before the end, on however slow a machine.
        time.sleep(0.02 if self.global_step < 10 or begins_at is not None else 0.2)
        if self.global_step == args.hang_at and self.global_rank == 1 and begins_at is None:
            time.sleep(600)
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Freed(L.Callback):
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        say(freed=type(exception).__name__, step=trainer.global_step)


L.seed_everything(0)
craft_callback: Any = CraftCallback(dirpath=str(args.saved))
begins_at = craft_callback.newest
say(begins=begins_at and os.path.basename(begins_at), rank=os.environ["RANK"], world_size=os.environ["WORLD_SIZE"])
if args.dies_before and os.environ["CRAFT_WORKER_ID"] == "w1":
    # The others have met CRAFT, and wait for this one at torch's store.
    time.sleep(2.0)
    os.kill(os.getpid(), signal.SIGKILL)
trainer = L.Trainer(
    accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]), max_steps=args.steps, max_epochs=-1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Freed(), craft_callback],
)  # fmt: skip
data = TensorDataset(torch.randn(512, 8), torch.randint(0, 4, (512,)))
trainer.fit(Module(), DataLoader(data, batch_size=4), ckpt_path=begins_at)
say(ended=trainer.global_step, batches=trainer.fit_loop.epoch_loop.batch_progress.total.completed)
