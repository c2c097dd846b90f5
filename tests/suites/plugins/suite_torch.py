"""pytest plugin: on a machine without a GPU, torch's own tests that ask for several run on the CPU, as far as their code can.

A server that has imported torch forks their processes: each would otherwise import it anew, which takes longer than the test.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import Backend, BackendConfig
from torch.testing._internal import common_distributed

T = TypeVar("T")
_own_init = BackendConfig.__init__


def _always(*_: Any, **__: Any) -> Callable[[T], T]:
    """Take the place of a decorator that skips a test."""
    return lambda test: test


def _by_server(self: Any) -> None:
    if self.world_size < 1:
        # It takes as many processes as there are GPUs, and would pass without a single one.
        raise unittest.SkipTest("it starts a process for each GPU")
    context = torch.multiprocessing.get_context("forkserver")
    # This plugin first: what is imported after it takes its decorators.
    context.set_forkserver_preload([__name__, "torch.testing._internal.distributed._tensor.common_dtensor"])
    self._start_processes(context.Process)


def _with_one_cpu(self: BackendConfig, backend: Any) -> None:
    """Some tests ask for the CPU's backend and for that of the device, which is the same here."""
    _own_init(self, Backend("gloo") if backend == "cpu:gloo,cpu:gloo" else backend)


if not torch.cuda.is_available():
    for _name in ("skip_if_lt_x_gpu", "requires_accelerator_dist_backend", "requires_nccl"):
        setattr(common_distributed, _name, _always)
    common_distributed.MultiProcessTestCase._spawn_processes = _by_server  # type: ignore[method-assign]
    BackendConfig.__init__ = _with_one_cpu  # type: ignore[method-assign]
