"""Refuse, by name, what torch offers inside a replica and CRAFT cannot make exact yet."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import _symmetric_memory
from torch.distributed.fsdp import FSDPModule

from craft.protocol.errors import ConfigError

_NOT_SYNCED = (
    "its gradients would stay on each worker until a later microbatch, which another replica may compute: to reduce less often,"
    " make microbatches larger, or accumulate inside one microbatch"
)
_SYMMETRIC = (
    "symmetric memory maps the memory of other workers, which nothing takes back when one of them is lost: leave it out"
)
_SETTINGS = (
    ("torch._dynamo.config", "skip_fsdp_hooks", (True,)),
    ("torch._inductor.config", "bucket_all_gathers_fx", ("none", None, False)),
    ("torch._inductor.config", "bucket_reduce_scatters_fx", ("none", None, False)),
    ("torch._inductor.config", "bucket_all_reduces_fx", ("none", None, False)),
    ("torch._inductor.config", "_micro_pipeline_tp", (False,)),
)
"""Module, name and accepted values of settings by which the compiler puts collectives into its graphs, or moves them."""


def refuse_calls() -> None:
    """Make torch's calls that cannot be supported raise ConfigError, for the rest of the process."""
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        setattr(FSDPModule, name, _without_false(getattr(FSDPModule, name)))
    for name in ("set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm"):
        if hasattr(FSDPModule, name):
            setattr(FSDPModule, name, _refused(f"FSDPModule.{name}", getattr(FSDPModule, name)))
    for name in ("enable_symm_mem_for_group", "rendezvous", "get_symm_mem_workspace"):
        setattr(_symmetric_memory, name, _refused(name, getattr(_symmetric_memory, name)))


def _without_false(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(module: Any, requires: bool, *args: Any, **kwargs: Any) -> None:
        if not requires:
            raise ConfigError(f"{original.__name__}(False) in a sharded replica: {_NOT_SYNCED}")
        original(module, requires, *args, **kwargs)

    return call


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"{name} in a sharded replica: {_SYMMETRIC}")

    return call


def check_compiler() -> None:
    """Raise ConfigError if torch.compile is set to insert or move collectives: these do not pass through the replica."""
    for module, name, accepted in _SETTINGS:
        value = getattr(sys.modules.get(module), name, accepted[0])
        if value not in accepted:
            raise ConfigError(
                f"{module}.{name} = {value!r} in a sharded replica: collectives that the compiler inserts or merges do not pass"
                " through the groups that CRAFT replaces after a loss. Leave the setting out, and compile each block"
                " (block.compile()) before fully_shard"
            )


def check_even(name: str, sizes: Sequence[int]) -> None:
    """Raise ConfigError unless all parts of an all-to-all have one size."""
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"{name} with parts of different sizes {list(sizes)}, as in expert parallelism without a fixed capacity: sizes that"
            " depend on the data are not supported in a sharded replica yet. Give each expert a fixed capacity (pad or drop"
            " tokens), so that all parts have one size"
        )
