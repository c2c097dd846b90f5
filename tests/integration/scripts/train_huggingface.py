"""A small language model under Hugging Face's Trainer, with all that people use: dropout, tokens that do not count, accumulation,
clipping, warm-up, evaluation and checkpoints of the Trainer's own on the way, a callback with a state.

Its last line says where the Trainer ended, as JSON.
"""

import argparse
import faulthandler
import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from craft import testing
from craft.adapters.huggingface import CraftTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
parser.add_argument("--epochs", type=float, default=2)
parser.add_argument("--steps", type=int, default=-1)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--fp16", action="store_true", help="with a gradient scaler, on a GPU")
parser.add_argument("--gpu", action="store_true", help="not on the CPU")
parser.add_argument("--full-determinism", action="store_true", help="the Trainer's own settings for equal bits")
parser.add_argument("--compile", action="store_true", help="torch_compile=True, without a compiler behind it")
parser.add_argument("--stream", action="store_true", help="from an IterableDataset; with --steps")
parser.add_argument("--begin-from", help="a checkpoint of the Trainer's own")
parser.add_argument("--best", action="store_true", help="load the best one at the end")
parser.add_argument("--patience", type=int, help="stop early, once eval_loss has not become smaller for so long")
parser.add_argument("--scheduler", default="linear")
parser.add_argument("--slow-until", type=Path, help="every microbatch takes longer until this file is there")
parser.add_argument("--slow-s", type=float, default=0.2, help="how much longer")
options = parser.parse_args()

faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()
warnings.simplefilter("ignore")

if options.gpu and not options.full_determinism:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

SIZE, LENGTH = 48, 12
SHAPE: Any = {"vocab_size": SIZE, "bos_token_id": None, "eos_token_id": None}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Of different lengths: in most of them the last tokens do not count."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        begins = torch.randint(0, SIZE, (number, 1), generator=generator)
        self._tokens = (begins + torch.arange(LENGTH) * torch.randint(1, 4, (number, 1), generator=generator)) % SIZE
        self._lengths = torch.randint(4, LENGTH + 1, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, there = self._tokens[index], (torch.arange(LENGTH) < self._lengths[index]).long()
        noisy = torch.where(torch.rand(LENGTH) < 0.05, torch.randint(0, SIZE, (LENGTH,)), tokens)
        return {"input_ids": noisy, "attention_mask": there, "labels": torch.where(there > 0, tokens, -100)}


class Streamed(IterableDataset[dict[str, torch.Tensor]]):
    """The same, without numbers and without a length that is known."""

    def __init__(self, number: int) -> None:
        self._sentences = Sentences(number)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(len(self._sentences)):
            yield self._sentences[index]


class Steps(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Has a state of its own, which follows the job."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


class Slowed(CraftTrainer):
    """As a script has it that overrides something: it gets batches."""

    def training_step(
        self, model: Any, inputs: dict[str, torch.Tensor], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        assert inputs["input_ids"].shape[1] == LENGTH
        if options.slow_until is not None and not options.slow_until.exists():
            # Whoever a test waits for comes before the end, on however slow a machine.
            time.sleep(options.slow_s if self.state.global_step < 12 else 4 * options.slow_s)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss


def build() -> Any:
    if options.model == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                **SHAPE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=LENGTH,
            )
        )  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**SHAPE, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))


steps = Steps()
trainer = Slowed(
    model_init=build,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=5e-3,
        lr_scheduler_type=options.scheduler,
        warmup_steps=3,
        max_grad_norm=0.5,
        bf16=options.bf16,
        fp16=options.fp16,
        torch_compile=options.compile,
        torch_compile_backend="aot_eager" if options.compile else None,
        full_determinism=options.full_determinism,
        use_cpu=not options.gpu,
        seed=7,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        save_total_limit=2,
        load_best_model_at_end=options.best,
        metric_for_best_model="eval_loss",
        include_num_input_tokens_seen="all",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Streamed(100) if options.stream else Sentences(320),
    eval_dataset=Sentences(64),
    callbacks=[steps] if options.patience is None else [steps, EarlyStoppingCallback(options.patience)],
)
output = trainer.train(resume_from_checkpoint=options.begin_from)
logged = [each for each in trainer.state.log_history if "loss" in each]
print(
    json.dumps(
        {
            "global_step": trainer.state.global_step,
            "epoch": trainer.state.epoch,
            "seen": steps.seen,
            "train_loss": output.training_loss,
            "losses": [each["loss"] for each in logged],
            "logged_at": [each["step"] for each in logged],
            "tokens": trainer.state.num_input_tokens_seen,
            "flos": trainer.state.total_flos,
            "best": os.path.basename(trainer.state.best_model_checkpoint or ""),
            "eval_loss": trainer.evaluate()["eval_loss"],
            "weights": float(sum(param.detach().double().abs().sum() for param in trainer.model.parameters())),
        }
    )
)
