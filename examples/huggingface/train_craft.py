"""A small language model on made-up text, trained with Hugging Face's Trainer: craft run --workers 4 train_craft.py."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from craft.adapters.huggingface import CraftTrainer


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards, each in its own stride."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        begins, strides = (torch.randint(1, 50, (number, 1), generator=generator) for _ in range(2))
        self._tokens = (begins + strides * torch.arange(16)) % 50

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


if __name__ == "__main__":
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    trainer = CraftTrainer(
        model_init=lambda: GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir="counting",
            num_train_epochs=2,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Counting(512, seed=0),
        eval_dataset=Counting(128, seed=1),
    )
    trainer.train()
    print(f"eval_loss {trainer.evaluate()['eval_loss']:.4f} after {trainer.state.global_step} steps")
