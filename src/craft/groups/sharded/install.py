"""Give a worker's script its replica as torch's world: a default process group, meshes, and calls that agree with it."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from craft.groups.sharded.operation import Replica
from craft.groups.sharded.process_group import BACKEND, ReplicaGroup
from craft.groups.sharded.refusals import refuse_calls
from craft.protocol.errors import ConfigError
from craft.settings.environ import set_world

dist: Any = torch.distributed
c10d: Any = distributed_c10d

logger = logging.getLogger(__name__)


def install(replica: Replica) -> None:
    """Make the default process group that of ``replica``, for the rest of the process. It communicates nothing."""
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already; in a sharded replica craft.join() does that: call it first, and "
            "leave init_process_group out"
        )

    def create(options: Any, _: Any) -> ReplicaGroup:
        # torch gives no ranks for the default group.
        ranks = tuple(options.global_ranks_in_group) or tuple(range(replica.size))
        return ReplicaGroup(replica, ranks, options.group_id)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    set_world(replica.position, replica.size)
    # Nothing is looked up in the store, which the other processes do not see.
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=replica.position, world_size=replica.size)
    _replace(c10d.init_process_group, _agree(replica))
    _replace(c10d.destroy_process_group, _keep_default)
    _replace(c10d._new_group_with_tag, _new_group_here)
    refuse_calls()


def _replace(original: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function in the place of one of torch's, also where a script has imported that by name."""
    replacement = functools.wraps(original)(make(original))
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, replacement)


def _agree(replica: Replica) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            for name, value in (("rank", replica.position), ("world_size", replica.size)):
                if given.get(name, -1) not in (-1, value):
                    raise ConfigError(
                        f"init_process_group({name}={given[name]}): this worker's replica is its world, with rank "
                        f"{replica.position} of {replica.size}; leave rank and world_size out, or the call"
                    )
            logger.info("init_process_group: kept the process group of the replica, rank %d of %d", *_place(replica))

        return init_process_group

    return make


def _place(replica: Replica) -> tuple[int, int]:
    return replica.position, replica.size


def _keep_default(original: Callable[..., Any]) -> Callable[..., Any]:
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            logger.info("destroy_process_group: kept the process group of the replica until the process ends")
        else:
            original(group)

    return destroy_process_group


def _new_group_here(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def _new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        # A Gloo or NCCL group of the script would be outside of what the replica can replace.
        if given.arguments.get("backend") not in (None, BACKEND):
            logger.info("new_group: a group of the replica instead of backend %s", given.arguments["backend"])
        given.arguments["backend"] = BACKEND
        given.arguments["backend_options"] = None
        return original(*given.args, **given.kwargs)

    return _new_group_with_tag


def mesh(replica: Replica, device: torch.device, /, **dimensions: int) -> DeviceMesh:
    """Return a mesh over the replica, such as ``mesh(replica, device, shard=2, tp=2)``."""
    product = math.prod(dimensions.values())
    if not dimensions or product != replica.size or min(dimensions.values()) < 1:
        sizes = ", ".join(f"{name}={size}" for name, size in dimensions.items())
        raise ConfigError(
            f"mesh({sizes}): the sizes multiply to {product if dimensions else 0}, and a replica has {replica.size} "
            f"workers; change the sizes, or start with --workers-per-replica {max(product, 1)}"
        )
    if dimensions.get("dp_replicate", 1) != 1:
        raise ConfigError(
            f"mesh(dp_replicate={dimensions['dp_replicate']}): CRAFT itself keeps the replicas; leave dp_replicate out, "
            "or give it size 1, and start more workers"
        )
    if device.type == "cuda":
        # Else torch chooses one by LOCAL_RANK, which a host with more workers than GPUs does not have.
        torch.cuda.init()  # type: ignore[no-untyped-call,unused-ignore]
        torch.cuda.set_device(device)
    return init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
