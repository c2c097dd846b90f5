"""``CraftTrainer`` outside of ``craft run``, as a job of one worker: what must come out as with the Trainer."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments

from craft.adapters.huggingface import CraftTrainer

STEPS = 12
"""Of two epochs, with a smaller batch at the end of each."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What transformers and torch warn of is no business of these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Noisy(torch.nn.Module):
    """Draws random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 1)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(self.dropout(x)).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


def samples(number: int = 22) -> list[dict[str, Any]]:
    made = torch.Generator().manual_seed(number)
    return [{"x": torch.randn(3, generator=made), "labels": float(index % 5)} for index in range(number)]


class Stream(IterableDataset[dict[str, Any]]):
    """Its passes have another order each, and no length that is known before."""

    def __init__(self, number: int = 22) -> None:
        self._number = number
        self._epoch = 0
        self.given: list[tuple[int, int]] = []

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in torch.randperm(self._number, generator=torch.Generator().manual_seed(self._epoch)).tolist():
            self.given.append((self._epoch, index))
            yield samples(self._number)[index]


def build(
    folder: Path, callbacks: Any = None, model: torch.nn.Module | None = None, data: Any = None, **arguments: Any
) -> CraftTrainer:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "save_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(**{**given, **arguments})
    return CraftTrainer(
        model=model or Noisy(), args=args, train_dataset=samples() if data is None else data, callbacks=callbacks
    )


def weights(trainer: CraftTrainer) -> list[float]:
    assert trainer.model is not None
    return [value for param in trainer.model.parameters() for value in param.detach().flatten().tolist()]


def losses(trainer: CraftTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("step", [4, 8])
def test_a_training_that_goes_on_from_a_checkpoint_is_the_one_that_was_not_interrupted(
    step: int, tmp_path: Path
) -> None:
    """In the middle of the first epoch, and of the second: the same samples, the same random numbers, the same bits."""
    whole = build(tmp_path)
    whole.train()
    later = build(tmp_path / "later")
    later.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert whole.state.global_step == later.state.global_step == STEPS
    assert weights(later) == weights(whole)
    assert losses(later) == losses(whole)


def test_data_that_is_not_to_be_skipped_begins_with_the_epoch(tmp_path: Path) -> None:
    build(tmp_path).train()
    later = build(tmp_path / "later", ignore_data_skip=True, max_steps=STEPS)
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    # Four steps more, over the beginning of the second epoch.
    assert later.state.global_step == STEPS and later._job.step == STEPS // 2 + STEPS - 8


def test_one_script_trains_several_times(tmp_path: Path) -> None:
    first, second = build(tmp_path / "a"), build(tmp_path / "b")
    first.train()
    second.train()
    assert weights(first) == weights(second)
    first.train()
    assert first.state.global_step == STEPS and weights(first) != weights(second)


class Epochs(TrainerCallback):  # type: ignore[misc]
    """Notes after which steps epochs ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended.append(state.global_step)


def test_an_iterable_dataset_is_read_pass_after_pass(tmp_path: Path) -> None:
    """Each epoch of the Trainer's is a pass; going on from a checkpoint in the second one has the same bits."""
    epochs, stream = Epochs(), Stream()
    whole = build(tmp_path, [epochs], data=stream, max_steps=STEPS + 2)
    whole.train()
    assert epochs.ended == [6, 12, 14] and int(whole.state.epoch or 0) == 2
    assert sorted(stream.given[:44]) == [(epoch, index) for epoch in range(2) for index in range(22)]
    later = build(tmp_path / "later", data=Stream(), max_steps=STEPS + 2)
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert weights(later) == weights(whole) and losses(later) == losses(whole)


def test_samples_are_grouped_by_their_length(tmp_path: Path) -> None:
    """The sampler is the Trainer's; its draw is that of the job's seed."""
    made = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 60, (40,), generator=made).tolist()
    data = [{"number": number, "labels": 1.0, "input_ids": [0] * length} for number, length in enumerate(lengths)]
    drawn: list[dict[tuple[int, ...], None]] = []
    """By training, its batches in their order. One may be computed again, for a check."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        drawn[-1][tuple(row["number"] for row in rows)] = None
        return {"x": torch.ones(len(rows), 3), "labels": torch.ones(len(rows))}

    arguments: dict[str, Any] = {
        "train_sampling_strategy": "group_by_length",
        "num_train_epochs": 1,
        "remove_unused_columns": False,
    }
    for folder in ("a", "b"):
        drawn.append({})
        trainer = build(tmp_path / folder, data=data, **arguments)
        trainer.data_collator = collate
        trainer.train()
    first, second = drawn
    assert list(first) == list(second)
    assert sorted(number for batch in first for number in batch) == list(range(40))
    apart = sum(abs(lengths[one] - lengths[other]) for one, other in first)
    assert apart < sum(abs(one - other) for one, other in zip(lengths[::2], lengths[1::2], strict=True))


class Failing(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise KeyError("the script's own")


def test_a_training_that_ends_by_an_error_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="the script's own"):
        build(tmp_path, callbacks=[Failing()]).train()
    left = set(threading.enumerate()) - before
    assert [each.name for each in left if each.name.startswith("craft")] == []


def test_a_compiled_model_trains_as_one_that_is_not(tmp_path: Path) -> None:
    """With a backend that compiles nothing: what is compiled is torch's business, that it is called is ours."""
    plain = build(tmp_path / "a")
    plain.train()
    compiled = build(tmp_path / "b", torch_compile=True, torch_compile_backend="eager")
    compiled.train()
    assert weights(compiled) == weights(plain)
    assert type(compiled.model_wrapped).__name__ == "OptimizedModule"


@pytest.mark.long
def test_a_size_of_batches_is_looked_for_until_one_fits_the_memory(tmp_path: Path) -> None:
    class TooLarge(Noisy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if len(x) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(x, labels)

    trainer = build(tmp_path, model=TooLarge(), auto_find_batch_size=True, per_device_train_batch_size=8)
    trainer.train()
    assert trainer._train_batch_size <= 2 and trainer.state.global_step > 0
