"""A fit whose steps are divided into microbatches among the workers: automatic optimization over one ``DataLoader``.

A batch of the ``DataLoader`` is a microbatch. Lightning's loop counts *rounds*: in each, all workers together compute as many
microbatches as the job has slots, and ``accumulate_grad_batches`` rounds are a step. Each microbatch of this worker goes
through Lightning's closure. In the last round of a step every gradient becomes the mean over the global batch; then clipping
and the update run once, on every worker. The trainer's progress is part of the training state (``progress.py``).
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from craft.adapters.lightning.fit.fit import FollowingFit, Native
from craft.protocol.errors import ConfigError
from craft.settings.environ import lightning_seed
from craft.worker.api.adapter_access import batch_steps
from craft.worker.api.steps import Step, has_another, look_at_commit, said_aside, seed_computing

_ENDLESS = 1 << 40
_NOTHING = object()


class RoundLoader:
    """Yields one item for each batch of Lightning's loop; all workers together compute ``per_round`` batches of data in it.

    Lightning detects an epoch's end by the length, so that one iterator serves all epochs, even one begun elsewhere.
    """

    def __init__(self, loader: DataLoader[Any], per_round: int, take: Callable[[], Any]) -> None:
        """``take`` returns the next item, or raises StopIteration."""
        self.loader = loader
        batches: Any = loader.batch_sampler
        self.batch = int(batches.batch_size)
        self._per_round = per_round
        self._take = take
        drawn = len(batches.sampler)
        self.samples = drawn - drawn % self.batch if batches.drop_last else drawn
        """In an epoch."""
        self.state_dict: Callable[[], dict[str, Any]]
        self.load_state_dict: Callable[[Any], None]

    def __len__(self) -> int:
        return -(-self.samples // (self.batch * self._per_round))

    def samples_of(self, first: int, rounds: int, limit: int) -> int:
        """Return the samples in so many rounds of an epoch from ``first`` on, of the first ``limit`` samples."""
        size = self.batch * self._per_round
        return max(0, min(rounds * size, min(limit, self.samples) - first * size))

    def __getattr__(self, name: str) -> Any:
        """Delegate to the script's loader; a state only where Lightning is to see it."""
        if name in ("loader", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.loader

    def __hash__(self) -> int:
        return id(self.loader)

    def __getstate__(self) -> dict[str, Any]:
        """Leave a copy without the fit."""
        return {name: value for name, value in vars(self).items() if name != "_take"}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._take()


class MicrobatchFit(FollowingFit):
    """Each batch of the ``DataLoader`` is a microbatch of a step."""

    def __init__(self, strategy: Any, trainer: Any, microbatches: int | None) -> None:
        super().__init__(strategy, trainer)
        self._loader: RoundLoader | None = None
        self._step: Step | None = None
        self._batches: Iterator[Any] | None = None
        """The rest of this worker's microbatches of the step; None between steps."""
        self._in_hand: Any = _NOTHING
        """The microbatch of this round in Lightning's loop that is not computed yet."""
        self._microbatch: Any = None
        """A further one, while it is computed."""
        self._computed: Any = None
        """The result of the last microbatch computed in this step."""
        if microbatches is not None:
            self._take_over_accumulation()
        self._rounds = trainer.accumulate_grad_batches
        self._per_round = microbatches or strategy.world_size
        self._let_steps_pass()
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._native_run = loop.run
        self.replace(loop, "run", self._run)
        self.replace(loop, "output_result_cls", _unscaled(loop.output_result_cls))

    def _take_over_accumulation(self) -> None:
        """The number of microbatches is given: batches that Lightning would accumulate are one of them."""
        trainer, accumulated, limit = (
            self.trainer,
            self.trainer.accumulate_grad_batches,
            self.trainer.limit_train_batches,
        )
        trainer.accumulate_grad_batches = 1
        self.undo.callback(setattr, trainer, "accumulate_grad_batches", accumulated)
        if isinstance(limit, int):
            trainer.limit_train_batches = -(-limit // accumulated)
            self.undo.callback(setattr, trainer, "limit_train_batches", limit)

    def _let_steps_pass(self) -> None:
        """Skip batch-transfer hooks for a ``Step``, which stands for a batch on a worker without a microbatch."""
        module: Any = self.strategy.lightning_module
        original = module._on_before_batch_transfer

        def pass_steps(batch: Any, dataloader_idx: int = 0) -> Any:
            return batch if isinstance(batch, Step) else original(batch, dataloader_idx)

        self.replace(module, "_on_before_batch_transfer", pass_steps)

    def process_dataloader(self, dataloader: Any) -> Any:
        connector: Any = importlib.import_module(f"{self.strategy.package}.trainer.connectors.data_connector")
        connector._worker_check(self.trainer, dataloader, "train_dataloader")
        self._loader = RoundLoader(dataloader, self._per_round, self._take)
        return self._loader

    @property
    def _samples_per_epoch(self) -> int:
        assert self._loader is not None
        return self._loader.samples_of(0, self.trainer.num_training_batches, self._loader.samples)

    def on_train_start(self) -> None:
        loader = self._loader
        assert loader is not None
        make_steps = partial(
            batch_steps,
            self.strategy._job,
            loader.loader,
            batch=loader.batch,
            microbatches=self._per_round * self._rounds,
            samples_per_epoch=self._samples_per_epoch,
            steps=most_steps(self.trainer),
            seed=lightning_seed(),
        )
        self.begin(make_steps)
        if self.progress.loaded:
            # Lightning asks for a state to resume in the middle of an epoch: this loader continues where the job is.
            loader.state_dict, loader.load_state_dict = dict, _nothing
            self.progress.resume()
        self.progress.runs = True

    # A round.

    def _take(self) -> Any:
        """Return the item of the next round: a microbatch, or the step itself if this worker has none."""
        if self._in_hand is not _NOTHING:
            # The script left the epoch (on_train_batch_start returned -1) before it was computed.
            return self._in_hand
        last = self._is_last()
        if self._batches is None:
            self.progress.rounds = 0
            self.strategy._accumulates = False
            step = self.driven.next() if self.driven is not None else None
            if step is None:
                self.stop()
                raise StopIteration
            self._step, self._batches, self._computed = step, iter(step), None
            self.surroundings.moved_on()
            self.strategy._accumulates = not last
            self._in_hand = next(self._batches, _NOTHING)
        else:
            self.progress.rounds += 1
            self.strategy._accumulates = not last
            assert self._step is not None
            if last or has_another(self._step):
                self._in_hand = next(self._batches, _NOTHING)
        if self._in_hand is None:
            return self._pass_nothing()
        return self._step if self._in_hand is _NOTHING else self._in_hand

    def _is_last(self) -> bool:
        """Return whether the next round is the last one of its step, as Lightning counts them."""
        position: int = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready + 1
        return position % self._rounds == 0 or bool(position >= self.trainer.num_training_batches)

    def _pass_nothing(self) -> None:
        """Handle None instead of a batch, which Lightning skips: the step has nothing to compute."""
        step = self._step
        assert step is not None and self._batches is not None
        if self._per_round * self._rounds > 1:
            raise ConfigError("the DataLoader gave None in the place of a batch: a step needs each of its microbatches")
        step.weight(0)
        assert next(self._batches, None) is None
        self._batches, self._in_hand = None, _NOTHING

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self._loader is not None
        # Hooks that log after the step log its mean: it counts with all samples of the step.
        if batch_idx == 0:
            self.recorder.reset_metrics()
        first = batch_idx - batch_idx % self._rounds
        rounds = min(self._rounds, self.trainer.num_training_batches - first)
        self._results.batch_size = self._loader.samples_of(first, rounds, self._samples_per_epoch)

    @property
    def _results(self) -> Any:
        return self.trainer.fit_loop.epoch_loop._results

    def _run(self, optimizer: Any, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        """Replace Lightning's method: before the last round of a step, compute a microbatch and update nothing."""
        loop = self.trainer.fit_loop.epoch_loop.automatic_optimization
        if not self.strategy._accumulates:
            return self._native_run(optimizer, batch_idx, kwargs)
        outputs: dict[str, Any] = {}
        if self._in_hand is not _NOTHING:
            self._compute(loop._make_closure(kwargs, optimizer, batch_idx))
            self._in_hand = _NOTHING
            outputs = self._computed.asdict() if self._computed.loss is not None else {}
        fit_loop = self.trainer.fit_loop
        if fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher):
            # Buffers hold this worker's microbatches, not what all workers have.
            look_at_commit(self._step, self.progress.rounds)  # type: ignore[arg-type]
        return outputs

    def optimizer_step(self, native: Native, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        assert step is not None and self._batches is not None
        if self._in_hand is not _NOTHING:
            self._compute(closure)
            self._in_hand = _NOTHING
        for batch in self._batches:
            self._microbatch = batch
            self._compute(closure)
        self._batches = self._microbatch = None
        self.follow_leader()
        self.recorder.put(self._results, step.metrics, self._results.batch_size, said_aside(step))
        result = self._result(step)

        def computed() -> Any:
            """The optimizer's closure: everything is computed already."""
            closure._result = result
            return result.loss

        closure._result = None
        return native(optimizer, computed, *args, **kwargs)

    def _result(self, step: Step) -> Any:
        """Return the output for hooks after the step: the loss is the same on every worker, even without a microbatch."""
        if self._computed is not None and self._per_round * self._rounds == 1:
            return self._computed
        loop: Any = self.trainer.fit_loop.epoch_loop.automatic_optimization
        extra = self._computed.extra if self._computed is not None else {}
        loss = torch.tensor(step.metrics["loss"]) if "loss" in step.metrics else None
        return loop.output_result_cls(closure_loss=loss, extra=extra)

    def _compute(self, closure: Any) -> None:
        """Compute one microbatch: Lightning's forward and backward."""
        step, epoch_loop = self._step, self.trainer.fit_loop.epoch_loop
        assert step is not None
        results, epoch_loop._results = epoch_loop._results, self.recorder
        self.recorder.stand_for(results)
        try:
            loss = closure()
        finally:
            epoch_loop._results = results
        self._computed = getattr(closure, "_result", None) or epoch_loop.automatic_optimization.output_result_cls(loss)
        if loss is None:
            # Lightning's way to skip a batch.
            step.weight(0)
        else:
            step.log(loss=loss)
        self.recorder.tell(step)

    def training_step(self, native: Native, *args: Any, **kwargs: Any) -> Any:
        strategy, step = self.strategy, self._step
        assert step is not None
        if self._in_hand is not _NOTHING:
            # Lightning has moved it to the device and run the script's hooks.
            seed_computing(step)
            return native(*args, **kwargs)
        batch = strategy.precision_plugin.convert_input(self._microbatch)
        batch = strategy.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)  # type: ignore[union-attr]
        batch = strategy.batch_to_device(batch)
        seed_computing(step)
        return native(batch, *args[1:], **kwargs)

    def on_train_end(self) -> None:
        self.recorder.reset_metrics()


def _nothing(_: Any) -> None:
    """Replaces an unwanted function."""


def _unscaled(kind: Any) -> Any:
    """Leave losses unscaled: the mean over the microbatches is taken of their gradients."""

    class Unscaled(kind):  # type: ignore[misc]
        @classmethod
        def from_training_step_output(cls, output: Any, normalize: int = 1) -> Any:
            return super().from_training_step_output(output)

    return Unscaled


def most_steps(trainer: Any) -> int:
    """Return the most steps that the fit loop will make; it ends by itself, earlier if it resumes from a checkpoint.

    Steps of a checkpoint are not subtracted: a joining worker may find a newer one under the same ``ckpt_path``.
    """
    limits = [_ENDLESS]
    if trainer.fit_loop.max_epochs not in (None, -1):
        limits.append(trainer.fit_loop.max_epochs * -(-trainer.num_training_batches // trainer.accumulate_grad_batches))
    if trainer.max_steps != -1:
        limits.append(trainer.max_steps)
    return int(min(limits))
