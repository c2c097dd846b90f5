"""``Trainer(strategy="craft")``: Lightning's fit loop over the steps of a job.

Lightning's loop gets one item per optimizer step (``loader.py``). In ``optimizer_step`` the step's microbatches that fall to this
worker go through Lightning's own closure, one after the other; then every gradient is the mean over the global batch, and
clipping and the update run once, on every worker. Where the trainer is belongs to the training state (``progress.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from craft.adapters.lightning import leading, refusals
from craft.adapters.lightning.loader import StepLoader
from craft.adapters.lightning.logged import Recorder
from craft.adapters.lightning.packages import check_version
from craft.adapters.lightning.progress import Progress, Surroundings
from craft.adapters.lightning.worker import Worker
from craft.protocol.errors import ConfigError
from craft.settings.lightning import global_seed
from craft.worker.steps import Driven, Step, said_aside

_ENDLESS = 1 << 40


class CraftStrategy(Worker):
    """Each process that ``craft run`` started is a worker of one job; losses, joins and drains do not change a bit."""

    strategy_name = "craft"
    package = "lightning.pytorch"

    def __init__(self, microbatches: int | None = None, **more: Any) -> None:
        """``microbatches``: batches of the DataLoader in a step; default: the job's slots times accumulate_grad_batches."""
        super().__init__(**more)
        check_version(self.package, importlib.import_module(self.package).__version__)
        self._microbatches = microbatches
        self._loader: StepLoader | None = None
        self._step: Step | None = None
        self._microbatch: Any = None
        self._recorder = Recorder()
        self._progress: Progress | None = None
        self._surroundings: Surroundings | None = None
        self._accumulated = 1
        self._evaluating = ExitStack()
        self._undo = ExitStack()
        self._leads = False
        # Before the script makes loggers: a worker in the place of a lost rank 0 must not take itself for that.
        self._take_rank()
        self._leads = self.is_global_zero

    # Before the first step.

    def _take_rank(self) -> None:
        rank_zero = importlib.import_module(f"{self.package}.utilities.rank_zero")
        rank_zero.rank_zero_only.rank = self.global_rank

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        refusals.check(trainer, self.root_device)
        # Agents handle signals; and a handler of Lightning's talks to other workers in the middle of anything, as does what
        # asks rank 0 before each step whether there was one.
        trainer._signal_connector.register_signal_handlers = _nothing
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing
        if trainer.state.fn == "fit":
            refusals.check_only_fit(trainer, self._job)
            if self._job.rank < 0:
                # The others have made this check, and wait for nobody.
                trainer.num_sanity_val_steps = 0
            self._take_over_accumulation(trainer)
            self._let_steps_pass()
        super().setup(trainer)

    def _take_over_accumulation(self, trainer: Any) -> None:
        """What Lightning would accumulate over several batches is one step here."""
        self._accumulated, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        trainer.accumulate_grad_batches = 1
        self._undo.callback(setattr, trainer, "accumulate_grad_batches", self._accumulated)
        if isinstance(limit, int):
            trainer.limit_train_batches = -(-limit // self._accumulated)
            self._undo.callback(setattr, trainer, "limit_train_batches", limit)

    def _let_steps_pass(self) -> None:
        """The hooks that transfer a batch are for batches: a ``Step`` is none."""
        module: Any = self.lightning_module
        original = module._on_before_batch_transfer

        def pass_steps(batch: Any, dataloader_idx: int = 0) -> Any:
            return batch if isinstance(batch, Step) else original(batch, dataloader_idx)

        module._on_before_batch_transfer = pass_steps
        self._undo.callback(delattr, module, "_on_before_batch_transfer")

    def process_dataloader(self, dataloader: object) -> object:
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        if not trainer.training:
            return dataloader
        self._loader = StepLoader(dataloader, self._microbatches or self.world_size * self._accumulated)
        return self._loader

    def on_train_start(self) -> None:
        """Everything is set up, and user code has had its say: meet the others, and take their state if they are on their way."""
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        loader = self._loader
        refusals.check_fit(trainer, loader)
        refusals.warn_of_what_stays(trainer)
        assert loader is not None
        job, seed = self._job, global_seed()
        self._progress, self._surroundings = Progress(trainer), Surroundings(trainer, self._recorder)
        job.replicate(self.model)  # type: ignore[type-var]
        job.register(**self._registered())
        steps = job.steps(
            loader.loader,
            global_batch=loader.global_batch,
            microbatches=loader.microbatches,
            steps=_most_steps(trainer),
            steps_per_epoch=trainer.num_training_batches,
            seed=seed,
        )
        self._driven = loader.driven = Driven(steps)
        loader.on_end = partial(_stop, trainer)
        self._driven.next()
        self._take_rank()
        if self._progress.loaded:
            self._progress.resume()
        self._progress.runs = True

    def _registered(self) -> dict[str, Any]:
        assert self._progress is not None and self._surroundings is not None
        items: dict[str, Any] = {f"optimizer{index}": each for index, each in enumerate(self.optimizers)}
        items |= {f"scheduler{index}": each.scheduler for index, each in enumerate(self.lr_scheduler_configs)}
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            items["scaler"] = scaler
        return items | {"trainer": self._progress, "surroundings": self._surroundings}

    # A step.

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, Step) else super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, Step) and self._loader is not None and self._surroundings is not None
        self._step = batch
        self._surroundings.moved_on()
        # Hooks that log after the step have no batch to take its size from.
        self._results.batch_size = self._loader.samples(batch_idx)

    @property
    def _results(self) -> Any:
        return self.lightning_module.trainer.fit_loop.epoch_loop._results  # type: ignore[union-attr]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = self._step
        assert step is not None
        for batch in step:
            self._microbatch = batch
            self._compute(step, closure)
        self._microbatch = None
        self._follow_leader()
        self._recorder.put(self._results, step.metrics, self._results.batch_size, said_aside(step))
        loss = torch.tensor(step.metrics.get("loss", float("nan")))
        # What hooks after the step get: the same on every worker, one that had no microbatch included.
        loop: Any = self.lightning_module.trainer.fit_loop.epoch_loop.automatic_optimization  # type: ignore[union-attr]
        closure._result = loop.output_result_cls(closure_loss=loss)  # type: ignore[attr-defined]
        return super().optimizer_step(optimizer, lambda: loss, model, **kwargs)

    def _follow_leader(self) -> None:
        """After each commit, before anything is written: whoever is rank 0 now writes."""
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        assert self._surroundings is not None
        self._take_rank()
        if self._surroundings.places is None:
            self._surroundings.places = self.broadcast(leading.places(trainer))
            leading.adopt(trainer, self._surroundings.places)
        if self.is_global_zero and not self._leads:
            self._leads = True
            leading.take_over(trainer)

    def _compute(self, step: Step, closure: Callable[[], Any]) -> None:
        """One microbatch: Lightning's own forward and backward."""
        epoch_loop: Any = self.lightning_module.trainer.fit_loop.epoch_loop  # type: ignore[union-attr]
        results, epoch_loop._results = epoch_loop._results, self._recorder
        try:
            loss = closure()
        finally:
            epoch_loop._results = results
        if loss is None:
            raise ConfigError(
                'training_step returned None: under strategy="craft" every microbatch has a loss; return one that is 0'
            )
        step.log(loss=loss)
        self._recorder.tell(step)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        batch = self.precision_plugin.convert_input(self._microbatch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = self.batch_to_device(batch)
        return super().training_step(batch, *args[1:], **kwargs)

    # Around validation, and at the end.

    def on_validation_start(self) -> None:
        self._evaluating.enter_context(self._job.paused("validation"))

    def on_validation_end(self) -> None:
        self._evaluating.close()

    def on_train_end(self) -> None:
        if self._driven is not None:
            self._driven.finish()

    def teardown(self) -> None:
        self._undo.close()
        super().teardown()


def _most_steps(trainer: Any) -> int:
    """How many steps the fit loop will make at most; it ends by itself, and earlier if it goes on from a checkpoint.

    Those that a checkpoint has are not left out: a worker that joins may find a newer one under the same ``ckpt_path``.
    """
    limits = [_ENDLESS]
    if trainer.fit_loop.max_epochs not in (None, -1):
        limits.append(trainer.fit_loop.max_epochs * trainer.num_training_batches)
    if trainer.max_steps != -1:
        limits.append(trainer.max_steps)
    return int(min(limits))


def _stop(trainer: Any) -> None:
    """The job was told to stop: so is the trainer, whatever it was to do at least."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None


def _nothing() -> None:
    """In the place of a function that is not wanted."""
