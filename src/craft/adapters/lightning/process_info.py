"""The strategy's view of its process, and its collectives between steps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from craft.protocol.errors import ConfigError
from craft.worker.api.adapter_access import slots_of
from craft.worker.api.job import Job
from craft.worker.api.steps import Driven
from craft.worker.entry.join import join
from craft.worker.membership.devices import own_device

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as _Strategy
else:
    _Strategy = object


class ProcessInfo(_Strategy):
    """The half of ``CraftStrategy`` that does not train."""

    package = "lightning.pytorch"
    _leads = False
    _joined: Job | None = None
    _driven: Driven | None = None
    _accumulates = False
    """Whether the current batch of Lightning's loop is not the last one of its step."""

    @property
    def _job(self) -> Job:
        if self._joined is None:
            self._joined = join()
        return self._joined

    def _take_rank(self) -> None:
        rank_zero = importlib.import_module(f"{self.package}.utilities.rank_zero")
        rank_zero.rank_zero_only.rank = self.global_rank

    @property
    def root_device(self) -> torch.device:
        """The device of the trainer's accelerator: the worker's GPU, or the CPU even on a host with GPUs."""
        is_cuda = type(self.accelerator).__name__ == "CUDAAccelerator"
        return own_device(self._job.local_rank) if is_cuda else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return self._job.is_leader

    @property
    def global_rank(self) -> int:
        """The rank in the current generation. A worker before its first step comes after all others."""
        return self._job.rank if self._job.rank >= 0 else self.world_size

    @property
    def local_rank(self) -> int:
        return self._job.local_rank

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        """The job's slots: losses do not change it, nor what is computed from it."""
        return slots_of(self._job)

    @world_size.setter
    def world_size(self, size: int) -> None:
        raise ConfigError(f"strategy.world_size = {size}: craft run says how many workers a job has, by --workers")

    # Between the steps.

    @property
    def _between(self) -> bool:
        if self._driven is None or self.lightning_module is None:
            return False
        # A worker whose trainer ends with an error runs its callbacks alone.
        return self._driven.between_steps and not self._accumulates and not self.lightning_module.trainer.interrupted

    def _demand_between(self, call: str) -> None:
        if self._driven is not None and not self._driven.ended and not self._between and self.world_size > 1:
            raise ConfigError(
                f"{call} while a step is computed: workers are not at the same place there; call it in a hook after the step"
            )

    def barrier(self, name: str | None = None) -> None:
        if self._between:
            self._job.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._demand_between("broadcast")
        return self._job.broadcast_object(obj) if self._between else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value: training values are means over the global batch, and validation runs on every worker."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        self._demand_between("all_gather")
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._between:
            return decision
        yes, votes = (int(each) for each in self._job.all_reduce(torch.tensor([int(decision), 1])))
        return yes == votes if all else yes > 0

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Let rank 0 write it; if it is lost meanwhile, the next one does."""
        written = False
        while not written:
            if writes := self.is_global_zero:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            written = not self._between or bool(self._job.all_reduce(torch.tensor([int(writes)])).item())
