"""A fit whose steps cannot be divided: every worker computes all of each step with Lightning's loop.

This applies if optimizers step inside ``training_step`` (manual optimization), if a step computes its loss several times
(LBFGS), and if CRAFT does not control the order of data: several loaders, iterables, custom samplers. A batch of Lightning's
loop is a step of the job. Each worker commits it with the others, then computes it; every worker reads all batches, in the
same order. More workers make such a fit no faster. They keep it going.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from craft.adapters.lightning.fit.fit import FollowingFit, HeldGradients
from craft.protocol.values.activity import Phase
from craft.settings.environ import lightning_seed
from craft.worker.api.adapter_access import whole_steps
from craft.worker.data import rng
from craft.worker.entry.worker_process import process

logger = logging.getLogger(__name__)


class WholeFit(FollowingFit):
    """Lightning's loop, each batch of it a step of the job."""

    def __init__(self, strategy: Any, trainer: Any, why: str) -> None:
        super().__init__(strategy, trainer)
        self._why = why
        """Why its steps cannot be divided."""
        self._seed = lightning_seed()
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._begin_epoch, self._advance = epoch_loop.on_run_start, epoch_loop.advance
        self.replace(epoch_loop, "on_run_start", self._on_epoch)
        self.replace(epoch_loop, "advance", self._on_batch)
        self._before_fetch = epoch_loop._on_before_fetch
        self.replace(epoch_loop, "_on_before_fetch", self._on_fetch)
        self._setup_data = fit_loop.setup_data

    def seed_epoch(self) -> None:
        """Seed the order of data by the job's seed and the epoch only, before the loaders are iterated."""
        seed = rng.derive(self._seed, rng.DATA, self.trainer.current_epoch)
        rng.seed_all(seed)
        loader = self.trainer.fit_loop._combined_loader
        for each in loader.flattened if loader is not None else ():
            for owner in (each, getattr(each, "sampler", None), getattr(each, "batch_sampler", None)):
                if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                    generator.manual_seed(seed)

    def _on_fetch(self) -> None:
        """Seed before each batch is read by its position only, as on a worker that skips it."""
        place = self.trainer.fit_loop._data_fetcher.fetched
        rng.seed_all(rng.derive(self._seed, rng.DATA, self.trainer.current_epoch, place))
        self._before_fetch()

    def on_train_start(self) -> None:
        if self.strategy.world_size > 1:
            logger.warning(
                "%s: every worker computes the whole of each step. The fit goes on through losses, and is as fast as with one"
                " worker", self._why,
            )  # fmt: skip
        self.begin(
            partial(whole_steps, self.strategy._job, self._seed),
            gradients=HeldGradients(self.strategy.lightning_module),
        )
        if self.progress.loaded:
            self._resume()
        self.progress.runs = True

    def _on_epoch(self, data_fetcher: Any) -> None:
        self.seed_epoch()
        self._begin_epoch(data_fetcher)

    def _on_batch(self, data_fetcher: Any) -> None:
        """Commit a step with the others, then compute it."""
        assert self.driven is not None
        step = self.driven.next()
        if step is None:
            self.stop()
            raise StopIteration
        for _ in step:
            pass
        self.surroundings.moved_on()
        self.follow_leader()
        process.activity.now(Phase.COMPUTING, step.number, 0)
        self._advance(data_fetcher)

    def _resume(self) -> None:
        """Continue where the state says: with the loaders of that epoch, after the batches that were used."""
        fit_loop, reloaded = self.trainer.fit_loop, self.progress.reloaded
        if self.trainer.reload_dataloaders_every_n_epochs and reloaded != fit_loop._last_train_dl_reload_epoch:
            self._reload(reloaded)
        self.progress.resume()
        used = fit_loop.epoch_loop.batch_progress.current.completed
        if not used:
            return
        fetcher = fit_loop._data_fetcher
        self.seed_epoch()
        iter(fetcher)
        fetcher._start_profiler, fetcher._stop_profiler = self._on_fetch, fit_loop.epoch_loop._on_after_fetch
        for _ in range(used):
            next(fetcher)
        # Lightning adds those to what was fetched.
        fetcher.fetched -= used

    def _reload(self, epoch: int) -> None:
        """Make the loaders as the others did at the beginning of ``epoch``."""
        fit_loop, current = self.trainer.fit_loop, self.trainer.fit_loop.epoch_progress.current
        current.completed, now = epoch, current.completed
        fit_loop._combined_loader = None
        self._setup_data()
        current.completed = now
