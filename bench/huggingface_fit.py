"""A training under Hugging Face's Trainer, plain or CRAFT's, in blocks of steps; for ``huggingface_overhead.py``.

Two of these run beside each other and take turns: whoever has done a block hands over and waits. So one computes at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

_WARM_UP = 15
_TOKENS = 512


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        self._tokens = torch.randint(0, _TOKENS, (4096, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Turns(TrainerCallback):  # type: ignore[misc]
    """On rank 0, for which the others wait in the exchange of the next step."""

    def __init__(self, args: argparse.Namespace, paused: Callable[[str], AbstractContextManager[None]]) -> None:
        self._steps, self._blocks, self._paused = args.steps_per_block, args.blocks, paused
        self._own, self._other = (os.open(path, os.O_RDWR) for path in (args.own_turn, args.other_turn))
        self._count = -_WARM_UP
        self._began = 0.0
        self.spans: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._count += 1
        # A block's first step wakes everybody up, and is left out.
        position = self._count % (self._steps + 1)
        if self._count > 0 and position == 1:
            self._began = time.perf_counter()
        if self._count > 0 and position == 0:
            self.spans.append(time.perf_counter() - self._began)
            os.write(self._other, b"1")
        if self._count >= 0 and position == 0 and len(self.spans) < self._blocks:
            with self._paused("its turn"):
                os.read(self._own, 1)


def build(args: argparse.Namespace) -> tuple[type[Trainer], Callable[[str], AbstractContextManager[None]]]:
    if args.system == "ddp":
        return Trainer, lambda _: nullcontext()
    import craft
    from craft.adapters.huggingface import CraftTrainer

    return CraftTrainer, craft.join().paused


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["ddp", "craft"], required=True)
    for name in ("--blocks", "--steps-per-block", "--batch", "--length", "--width"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--own-turn", "--other-turn", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, paused = build(args)
    turns = Turns(args, paused)
    config = GPT2Config(
        vocab_size=_TOKENS, n_positions=args.length, n_embd=args.width, n_layer=4, n_head=4, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    trainer = kind(
        model_init=lambda: GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(args.out.parent / args.system),
            max_steps=_WARM_UP + args.blocks * (args.steps_per_block + 1),
            per_device_train_batch_size=args.batch,
            # What the Trainer asks of DDP by default makes it slower.
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Tokens(args.length),
        callbacks=[turns],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        args.out.write_text(json.dumps(turns.spans))


if __name__ == "__main__":
    main()
