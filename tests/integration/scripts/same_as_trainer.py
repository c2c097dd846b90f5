"""Trains a small model with Hugging Face's Trainer and with CraftTrainer, as a job of one worker; prints how far apart they are.

On the CPU, or with ``--gpu`` on a GPU. Both take 8 batches with different numbers of tokens that count to a step, in the same
order.
"""

import json
import os
import sys
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from craft.adapters.huggingface import CraftTrainer

SHAPE: Any = {"vocab_size": 32, "n_positions": 10, "n_embd": 32, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
NO_DROPOUT: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}

ON_GPU = "--gpu" in sys.argv[1:]


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 32, (96, 10), generator=generator)
    counts = torch.randint(2, 11, (96,), generator=generator)
    return [
        {"input_ids": each, "labels": torch.where(torch.arange(10) < count, each, -100)}
        for each, count in zip(tokens, counts, strict=True)
    ]


def build() -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(**SHAPE, **NO_DROPOUT))


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def train(kind: type[Trainer], folder: str) -> tuple[torch.Tensor, list[float]]:
    trainer = kind(
        model=build(),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=8,
            train_sampling_strategy="sequential",
            # A plain one: with Adam the direction of the smallest gradients would count as much as that of large ones.
            optim="sgd",
            learning_rate=0.5,
            max_grad_norm=0.1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not ON_GPU,
        ),
        train_dataset=samples(),
    )
    trainer.train()
    assert trainer.model.device.type == ("cuda" if ON_GPU else "cpu")
    return weights_of(trainer.model).cpu(), [each["loss"] for each in trainer.state.log_history if "loss" in each]


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder:
        (plain, plain_losses), (ours, our_losses) = train(Trainer, folder), train(CraftTrainer, folder)
    apart = max(abs(one - other) for one, other in zip(plain_losses, our_losses, strict=True))
    moved = float((ours - weights_of(build())).abs().max())
    print(json.dumps({"weights": float((plain - ours).abs().max()), "losses": apart, "moved": moved}))
