"""``CraftTrainer``: Hugging Face's training loop over the steps of a job.

The loop gets one item per optimizer step (``loader.py``). Instead of training on a batch, it passes this worker's microbatches
of the step through the Trainer's ``training_step``; then every gradient is the mean over the global batch, and clipping, the
update and all that follows run once, on every worker. The Trainer's progress is part of the training state (``progress.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import trainer as home

from craft.adapters.huggingface import refusals
from craft.adapters.huggingface.accelerate_env import keep_alone, take_rank, use_one_gpu
from craft.adapters.huggingface.loader import StepInputs, TrainerStepLoader
from craft.adapters.huggingface.progress import TrainerCallbackStates, TrainerProgress
from craft.protocol.errors import ConfigError
from craft.settings.environ import hidden_from_accelerate
from craft.worker.api.adapter_access import has_trained, is_alone, slots_of
from craft.worker.api.job import Job
from craft.worker.api.steps import Driven, Step
from craft.worker.entry.join import join, join_anew

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

_MAX_SHAPES = 256
"""Past its limit torch would continue without compiled kernels, which changes bits; here it is an error."""

keep_alone()


class CraftMixin(_Trainer):  # type: ignore[misc]
    """Put it before ``Trainer`` or a subclass among the bases: ``class Mine(CraftMixin, Seq2SeqTrainer)``."""

    def __init__(self, *given: Any, microbatches: int | None = None, **named: Any) -> None:
        """``microbatches``: batches in a step; default: the job's slots times gradient_accumulation_steps."""
        self._job: Job = join()
        self._microbatches = microbatches
        self._accumulated = 1
        self._loader: TrainerStepLoader | None = None
        self._driven: Driven | None = None
        self._progress: TrainerProgress | None = None
        self._surroundings: TrainerCallbackStates | None = None
        self._prepared: Any = None
        with hidden_from_accelerate():
            super().__init__(*given, **named)
        use_one_gpu(self)
        self._follow_leader()

    # Who writes.

    def _follow_leader(self) -> bool:
        """After each commit, before anything is written: let the current rank 0 write. Return whether that is this worker."""
        rank = self._job.rank
        take_rank(rank if rank >= 0 else slots_of(self._job))
        self.state.is_world_process_zero = self.state.is_local_process_zero = rank == 0
        return rank == 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let rank 0 write it; if it is lost meanwhile, the next one does. Then the others record it."""
        with self._job.paused("saving"), self._accumulating():
            wrote = False
            while True:
                if writes := self._follow_leader():
                    super()._save_checkpoint(model, trial)
                    wrote = True
                if not self._between or self._job.all_reduce(torch.tensor([int(writes)])).item():
                    break
            if not wrote:
                super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
            if self._progress is not None:
                self._progress.save(output_dir)

    @property
    def _between(self) -> bool:
        """Whether all workers are at the same point, where collectives are allowed."""
        return self._driven is not None and self._driven.between_steps

    # Before the first step.

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **named: Any) -> Any:
        if self._job.rank < 0:
            resume_from_checkpoint = still_there(resume_from_checkpoint, self.args.output_dir)
        return super().train(resume_from_checkpoint, *given, **named)

    def _inner_training_loop(self, *given: Any, **named: Any) -> Any:
        if has_trained(self._job) and is_alone(self._job):
            # A job has one loop. Outside of craft run each training is a job of one.
            self._job = join_anew()
        refusals.check(self, self._job, named.get("trial"))
        with self._by_steps(), _compiled_by_shape(self.args.torch_compile):
            output = super()._inner_training_loop(*given, **named)
            assert self._driven is not None
            self._driven.finish()
        return output

    @contextmanager
    def _by_steps(self) -> Iterator[None]:
        """Make the loop train on steps. Overridden methods of the script's class still get batches."""
        self._accumulated, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, 1
        # On this object, so that they precede methods of the script's class.
        shadows = {"get_train_dataloader": partial(_load_steps, self), "training_step": self._train_on}
        self.__dict__.update(shadows)
        skip, home.skip_first_batches = home.skip_first_batches, _skip_nothing
        try:
            yield
        finally:
            if self._driven is not None:
                self._driven.close()
            home.skip_first_batches = skip
            for name in shadows:
                delattr(self, name)
            self.args.gradient_accumulation_steps = self._accumulated

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Restore the script's arguments while they are written."""
        before, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, self._accumulated
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = before

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._loader.global_batch if self._loader is not None else super().get_total_train_batch_size(args)

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *more: Any) -> tuple[int, int]:
        """Also make everything else before the first step: only then can the state of others be taken, which sets the start."""
        place: tuple[int, int] = super()._init_training_state(max_steps, steps_per_epoch, *more)
        resume_from_checkpoint = more[1]
        self._prepared = super()._prepare_for_training(max_steps, self._loader, resume_from_checkpoint)
        # From a checkpoint of the Trainer: at the same sample of the same epoch.
        start_step = min(place[0] * steps_per_epoch + place[1], max_steps)
        self._progress, self._surroundings = TrainerProgress(self), TrainerCallbackStates(self)
        if resume_from_checkpoint is not None:
            self._progress.go_on_from(resume_from_checkpoint)
        self._meet(max_steps, steps_per_epoch, start_step)
        return self._place(steps_per_epoch) if self._progress.loaded else place

    def _place(self, steps_per_epoch: int) -> tuple[int, int]:
        """Return where the loaded state is: the epoch, and the steps done in it."""
        loader, done = self._loader, self.state.global_step
        assert loader is not None and loader.driven is not None
        if not loader.is_iterable:
            return done // steps_per_epoch, done % steps_per_epoch
        before = self.state.epoch or 0.0
        epoch = loader.driven.epoch
        loader.epoch = int(before) if epoch is None else epoch
        # The Trainer's epochs are as long as steps_per_epoch says, even if a pass was shorter.
        return loader.epoch, round((before - loader.epoch) * steps_per_epoch) if int(before) == loader.epoch else 0

    def _prepare_for_training(self, *_: Any) -> Any:
        prepared, self._prepared = self._prepared, None
        return prepared

    def _meet(self, max_steps: int, steps_per_epoch: int, start_step: int) -> None:
        """Join the others once everything is set up, and take their state if they train already."""
        job, loader, args = self._job, self._loader, self.args
        assert loader is not None
        job.replicate(self.model)
        job.register(**self._registered())
        steps = job.steps(
            loader.loader,
            global_batch=loader.global_batch,
            microbatches=loader.microbatches,
            steps=max_steps,
            steps_per_epoch=steps_per_epoch if loader.has_length else None,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=loader.shuffle,
            start_step=start_step,
        )
        self._driven = loader.driven = Driven(steps)
        loader.on_end = self._stop
        self._driven.next()
        self._follow_leader()

    def _registered(self) -> dict[str, Any]:
        items: dict[str, Any] = {"optimizer": self.optimizer.optimizer, "scheduler": self.lr_scheduler}
        if self.accelerator.scaler is not None:
            items["scaler"] = self.accelerator.scaler
        return items | {"trainer": self._progress, "surroundings": self._surroundings}

    def _stop(self) -> None:
        """Stop the loop because the job was told to stop."""
        self.control.should_training_stop = True

    # An epoch.

    def _run_epoch(self, **named: Any) -> None:
        assert self._progress is not None
        if self._progress.loaded:
            # The loop continues in the middle of an epoch only if it knows a checkpoint.
            named["resume_from_checkpoint"] = "the job's own"
        self._progress.run()
        super()._run_epoch(**named)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: random generators are seeded for each microbatch."""

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self._progress is not None and self._progress.loaded:
            # The workers that began the job have run the evaluation before the first step.
            return {}
        with self._job.paused("evaluation"):
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler)

    # A step.

    def _train_on(self, model: Any, inputs: StepInputs, num_items_in_batch: Any = None) -> torch.Tensor:
        """Replace ``training_step``: compute this worker's part of a step."""
        step = inputs.step
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            # Also if this worker has no microbatch: what is sent to others must not depend on that.
            train()
        self.current_gradient_accumulation_steps = 1
        for batch in step:
            self._compute(step, model, batch)
        self._follow_leader()
        assert self._surroundings is not None and self._progress is not None
        self._progress.usual_items = self._progress.usual_items or step.metrics.get("items")
        self._surroundings.agree_on_place(self._job.broadcast_object)
        return torch.tensor(step.metrics["loss"])

    def _compute(self, step: Step, model: Any, batch: Any) -> None:
        """Compute one microbatch: forward and backward of the Trainer, or of the script's class."""
        # Counted before the batch goes to the device, so that nothing waits for it.
        items = self._get_num_items_in_batch([batch], torch.device("cpu"))
        if items is not None:
            # The mean over the items of the global batch, as the Trainer has it over all processes. The usual number weighs 1,
            # which costs nothing.
            assert self._progress is not None
            step.log(items=items)
            step.weight(float(items) / (self._progress.usual_items or 1.0))
            items = items.clamp(min=1).to(self.args.device, non_blocking=True)
        main = batch.get(getattr(self.model, "main_input_name", "input_ids"))
        step.log(tokens=0 if main is None else main.numel())
        step.log(loss=type(self).training_step(self, model, batch, items))

    def _prepare_input(self, data: Any) -> Any:
        """Move to the device; without waiting if the script says so to accelerate, whose loaders this replaces."""
        if isinstance(data, torch.Tensor) and self.accelerator.non_blocking:
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        # The same on every worker; what a script logs elsewhere may not be.
        logs = self.control.should_evaluate or self.control.should_log
        super()._maybe_log_save_evaluate(*given, **named)
        if logs and self._between:
            assert self._surroundings is not None
            self._surroundings.agree_on_log(self._job.broadcast_object)

    # Totals over all workers, from the mean over the microbatches.

    def _tokens(self, step: Step) -> float:
        assert self._loader is not None
        position = self.state.global_step % len(self._loader) if self._loader.has_length else 0
        samples = self._loader.samples(position)
        return step.metrics["tokens"] * min(self._loader.microbatches, samples)

    def floating_point_ops(self, inputs: Any) -> Any:
        if not isinstance(inputs, StepInputs):
            return super().floating_point_ops(inputs)
        if not hasattr(self.model, "num_parameters"):
            return 0
        return 6 * self._tokens(inputs.step) * self.model.num_parameters(exclude_embeddings=True)

    def _track_num_input_tokens(self, inputs: StepInputs) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += round(self._tokens(inputs.step))


class CraftTrainer(CraftMixin, transformers.Trainer):  # type: ignore[misc]
    """``Trainer`` in each worker of a job that ``craft run`` started; losses, joins and drains do not change a bit."""


def _load_steps(trainer: Any) -> TrainerStepLoader:
    with trainer._accumulating():
        loader = type(trainer).get_train_dataloader(trainer)
    microbatches = trainer._microbatches or slots_of(trainer._job) * trainer._accumulated
    trainer._loader = steps = TrainerStepLoader(loader, microbatches)
    if steps.has_length and len(steps) == 0:
        raise ConfigError(f"the dataset has fewer samples than the {steps.global_batch} of one step")
    return steps


@contextmanager
def _compiled_by_shape(compiles: bool) -> Iterator[None]:
    """Make torch compile once for each shape of a batch, without a limit.

    By default a second shape makes torch compile kernels for all shapes, and use them from then on. The kernels of a
    microbatch, and so its bits, would depend on what this worker has computed before.
    """
    if not compiles:
        yield
        return
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        recompile_limit=_MAX_SHAPES,
        accumulated_recompile_limit=8 * _MAX_SHAPES,
        fail_on_recompile_limit_hit=True,
    ):
        yield


def _skip_nothing(loader: Any, num_batches: int = 0) -> Any:
    """Replace accelerate's function: steps start where the job is."""
    return loader


def still_there(checkpoint: str | bool | None, output_dir: str) -> str | None:
    """Return the checkpoint that a late worker continues from: the same as the first workers, who may all have been lost.

    None once it was removed, or while a newer one is being written: only a job that has begun does that, and this worker takes
    its state, whatever it has loaded.
    """
    found = home.get_last_checkpoint(output_dir) if checkpoint is True else checkpoint or None
    # Written last.
    return found if found is not None and os.path.isfile(os.path.join(found, home.TRAINER_STATE_NAME)) else None
