"""A worker that fits the same model twice with Lightning, in turns: ``strategy="craft"`` and Lightning's own ``"ddp"``.

Both trainers live in this process, each on a thread of its own, and only one of them runs: after a block of steps a callback
holds it until the other one has trained a block. ``bench/lightning_overhead.py`` starts the workers; that of rank 0 writes the
block times. With ``--system craft`` there is one trainer alone, for whoever measures something else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import Batch, Samples, build_model, build_optimizer, fit_samples

CALIBRATION_STEPS = 30


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build_model()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(self.net(features), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.net)


class Blocks(L.Callback):
    """Measures blocks of steps, all workers starting level; between them it calls ``turn``."""

    def __init__(self, steps: int, turn: Callable[[], None]) -> None:
        self._steps = steps
        self._turn = turn
        self._since = 0.0
        self.times: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin()

    def _begin(self) -> None:
        dist.barrier()
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % self._steps == 0:
            self.times.append(time.perf_counter() - self._since)
            self._turn()
            if trainer.global_step < trainer.max_steps:
                self._begin()


class Turns:
    """Two threads of which one runs: the first one is whoever calls ``first``; the other begins at the first change."""

    def __init__(self, second: Callable[[], None]) -> None:
        self._go = [threading.Semaphore(0), threading.Semaphore(0)]
        self._thread = threading.Thread(target=self._run, args=(second,), daemon=True)

    def _run(self, second: Callable[[], None]) -> None:
        try:
            second()
        finally:
            self._go[0].release()

    def first(self) -> None:
        """The first thread's block is over."""
        if not self._thread.ident:
            self._thread.start()
        else:
            self._go[1].release()
        self._go[0].acquire()

    def second(self) -> None:
        """The second thread's block is over."""
        self._go[0].release()
        self._go[1].acquire()

    def join(self) -> None:
        self._go[1].release()
        self._thread.join()


def fit(strategy: str, samples: int, workers: int, steps: int, *callbacks: L.Callback) -> None:
    """Train ``steps`` steps as a script of Lightning's does."""
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, devices=workers if strategy == "ddp" else 1, max_steps=steps,
        max_epochs=-1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Samples(), batch_size=samples, shuffle=True, drop_last=True))


def calibrate(target_s: float, workers: int) -> int:
    """Return the samples per worker that make a step under ddp take ``target_s``; the same answer on every worker."""

    def measure(samples: int) -> float:
        blocks = Blocks(1, lambda: None)
        fit("ddp", samples, workers, CALIBRATION_STEPS, blocks)
        slowest = torch.tensor(statistics.median(blocks.times[5:]))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return fit_samples(target_s, measure, (64, 256, 1024))


def compare(samples: int, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the seconds of each block under craft and of the one under ddp behind it; the slowest worker's."""
    steps = args.steps_per_block * (args.warmup_pairs + args.pairs)
    turns = Turns(lambda: fit("ddp", samples, args.workers, steps, ddp))
    craft, ddp = Blocks(args.steps_per_block, turns.first), Blocks(args.steps_per_block, turns.second)
    fit("craft", samples, args.workers, steps, craft)
    turns.join()
    pairs = list(zip(craft.times, ddp.times, strict=True))
    slowest = torch.tensor(pairs[args.warmup_pairs :], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [(craft_s, ddp_s) for craft_s, ddp_s in slowest.tolist()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=["both", "craft"], default="both")
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument("--workers", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    parser.add_argument("--samples", type=int, default=0, help="samples per worker, instead of a calibration")
    parser.add_argument("--steps", type=int, default=1000, help="of one trainer alone")
    parser.add_argument("--meet", type=Path, help="a new file, shared by the workers, to meet at")
    parser.add_argument("--step-ms", type=float, default=30.0, help="the step under ddp to calibrate for")
    parser.add_argument("--pairs", type=int, default=50, help="pairs of blocks to measure")
    parser.add_argument("--warmup-pairs", type=int, default=2, help="pairs of blocks to leave out at the start")
    parser.add_argument("--steps-per-block", type=int, default=20)
    parser.add_argument("--blocks", type=Path, help="where rank 0 writes the samples and the block times")
    return parser.parse_args()


def main() -> None:
    args = parse()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    L.seed_everything(0)
    if args.system == "craft":
        fit("craft", args.samples, args.workers, args.steps)
        return
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=args.rank, world_size=args.workers)
    samples = args.samples or calibrate(args.step_ms / 1e3, args.workers)
    pairs = compare(samples, args)
    if args.rank == 0:
        blocks = [{"system_s": craft_s, "ddp_s": ddp_s} for craft_s, ddp_s in pairs]
        args.blocks.write_text(json.dumps({"samples": samples, "blocks": blocks}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
