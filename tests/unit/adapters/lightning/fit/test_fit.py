"""Fits in a job of one: by the same hooks, and to the same weights, as with Lightning's own strategy."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import craft.adapters.lightning  # noqa: F401
from craft.protocol.errors import ConfigError

Called = list[tuple[Any, ...]]

pytestmark = pytest.mark.filterwarnings("ignore")
"""Lightning has much to say, also about torch."""

SAMPLES = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))


def loader(**more: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(SAMPLES), batch_size=2, **more)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(SAMPLES)


class Module(L.LightningModule):
    """Says which hooks were called, with what."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.called: Called = []
        self.lr = 0.1

    def loss(self, batch: Any) -> torch.Tensor:
        while not isinstance(batch, torch.Tensor):
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.called.append(("training_step", batch_idx))
        return {"loss": loss, "seen": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.called.append(("validation_step", batch_idx, self.global_step))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.called.append(("on_train_batch_start", type(batch).__name__, batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.called.append(("on_train_batch_end", sorted(outputs or ()), batch_idx, self.global_step))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called.append(("on_before_zero_grad",))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.layer.weight], lr=0.1), torch.optim.SGD([self.layer.bias], lr=0.2)]


class ByIterator(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class Bfgs(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class LeavesOut(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class EndsEarly(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.called.append(tuple(batch[0].flatten().tolist()))
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # type: ignore[override]
        return -1 if batch_idx == 4 else None


def trainer_of(strategy: str, **more: Any) -> L.Trainer:
    more |= {name: value() for name, value in more.items() if callable(value)}
    options: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | more
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fitted(strategy: str, kind: type[Module], data: Any, **more: Any) -> tuple[Module, L.Trainer]:
    module, trainer = kind(), trainer_of(strategy, **more)
    trainer.fit(module, data() if callable(data) else data)
    return module, trainer


@pytest.mark.parametrize(
    ("kind", "data", "more"),
    [
        (Module, loader(), {}),
        (Module, loader(drop_last=True), {"limit_train_batches": 5, "accumulate_grad_batches": 5}),
        (Module, loader(), {"max_epochs": -1, "max_steps": 13}),
        (LeavesOut, loader(), {}),
        (Manual, loader(), {}),
        (Bfgs, loader(), {}),
        (ByIterator, loader(), {}),
        (Module, {"first": loader(), "second": loader()}, {}),
        (Module, lambda: CombinedLoader([loader(), loader()], "min_size"), {}),
        (Module, DataLoader(Stream(), batch_size=4), {"accumulate_grad_batches": 2}),
        (Module, list(SAMPLES.split(4)), {}),
        (Module, loader(), {"reload_dataloaders_every_n_epochs": 1}),
        (Module, loader(), {"callbacks": lambda: [callbacks.EMAWeightAveraging(decay=0.5)]}),
        (Module, loader(), {"callbacks": lambda: [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)]}),
        (
            Module,
            loader(),
            {
                "callbacks": lambda: [
                    callbacks.ModelPruning("l1_unstructured", amount=0.5, use_global_unstructured=False)
                ]
            },
        ),
        (Module, loader(), {"callbacks": lambda: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]}),
    ],
)
def test_a_job_of_one_calls_the_hooks_and_comes_to_the_weights_of_lightnings_own_strategy(
    kind: type[Module], data: Any, more: dict[str, Any]
) -> None:
    (own, own_trainer), (ours, trainer) = (fitted(strategy, kind, data, **more) for strategy in ("auto", "craft"))
    assert ours.called == own.called
    assert trainer.global_step == own_trainer.global_step
    assert trainer.callback_metrics.keys() == own_trainer.callback_metrics.keys()
    # The sum of several losses, each divided, is not to the bit the mean of their gradients.
    same = torch.allclose if "accumulate_grad_batches" in more else torch.equal
    for name, value in own.state_dict().items():
        assert same(value, ours.state_dict()[name]), name


def test_an_epoch_that_the_script_ends_early_loses_no_batch() -> None:
    module, trainer = fitted("craft", EndsEarly, loader())
    seen = [each for each in module.called if isinstance(each[0], float)]
    assert seen == [tuple(batch.flatten().tolist()) for batch in SAMPLES.split(2)][:8]
    assert trainer.global_step == 8


def test_batches_are_counted_as_lightning_does_where_several_are_accumulated() -> None:
    """In the middle of a step, too: an interval of validation, and what is left at the end of an epoch."""
    more = {"accumulate_grad_batches": 3, "limit_train_batches": 7, "val_check_interval": 2}
    called = []
    for strategy in ("auto", "craft"):
        module, trainer = Module(), trainer_of(strategy, **more)
        trainer.fit(module, loader(), loader())
        called.append((module.called, trainer.global_step))
    assert called[0] == called[1]


def test_each_fit_is_a_job_where_no_craft_run_is() -> None:
    trainer, module = trainer_of("craft"), Module()
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    assert trainer.global_step == 30
    trainer_of("craft").fit(Module(), loader())


class Wrong(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise LookupError("of the script's")
        return super().training_step(batch, batch_idx)


class WrongByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise LookupError("of the script's")
        super().training_step(batch, batch_idx)


class WrongBetween(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise LookupError("of the script's")


@pytest.mark.parametrize("kind", [Wrong, WrongByHand, WrongBetween])
def test_an_error_of_the_scripts_comes_out_of_the_fit_and_nothing_of_the_job_stays(kind: type[Module]) -> None:
    before = set(threading.enumerate())
    module, trainer = kind(), trainer_of("craft", accumulate_grad_batches=1)
    with pytest.raises(LookupError, match="of the script's"):
        trainer.fit(module, loader())
    assert set(threading.enumerate()) == before
    assert trainer.accumulate_grad_batches == 1
    assert "advance" not in vars(trainer.fit_loop.epoch_loop) and "run" not in vars(
        trainer.fit_loop.epoch_loop.automatic_optimization
    )
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    fitted("craft", Module, loader())


def test_a_batch_that_is_none_is_left_out_as_lightning_does() -> None:
    called = []
    for strategy in ("auto", "craft"):
        numbers: Any = list(range(4))
        samples: Any = DataLoader(numbers, collate_fn=lambda given: None if given[0] == 1 else SAMPLES[given])
        module, trainer = fitted(strategy, Module, lambda samples=samples: samples, max_epochs=1)
        called.append((module.called, trainer.global_step))
    assert called[0] == called[1]


def test_a_sampler_of_the_scripts_own_is_cut_too() -> None:
    data = loader(sampler=WeightedRandomSampler([1.0] * 20, 10, generator=torch.Generator()))
    first, _ = fitted("craft", Module, data)
    again, trainer = fitted("craft", Module, data)
    assert torch.equal(first.layer.weight, again.layer.weight)
    assert trainer.num_training_batches == 5


def test_values_are_found_before_a_fit_by_lightning_alone(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    module, trainer = Module(), trainer_of("craft", default_root_dir=tmp_path)
    with caplog.at_level(logging.WARNING, "craft"):
        assert Tuner(trainer).lr_find(module, loader(), num_training=5, update_attr=True) is not None
    assert "LearningRateFinder: no other worker could follow this fit" in caplog.text
    trainer.fit(module, loader())
    assert trainer.global_step == 20


def test_a_trainer_can_be_copied_and_pickled() -> None:
    _, trainer = fitted("craft", Module, loader())
    copied: Any = pickle.loads(pickle.dumps(copy.deepcopy(trainer.strategy)))
    assert type(copied) is type(trainer.strategy)
    assert vars(copied)["_joined"] is None


def test_how_many_workers_there_are_is_not_the_scripts_to_say() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.world_size = 2: craft run says"):
        setattr(trainer_of("craft").strategy, "world_size", 2)  # noqa: B010
