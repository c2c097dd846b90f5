"""Choose a worker's device, and connect the devices of a generation's members."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable
from typing import Literal

import torch

from craft.groups.gloo import GlooGroup
from craft.groups.nccl import NcclGroup
from craft.groups.nccl_calls import Communicator, NcclError, unique_id
from craft.protocol.errors import ConfigError, GroupBroken
from craft.settings.environ import prepare_nccl
from craft.worker.membership.all_gather import gather

logger = logging.getLogger(__name__)

_OF_HARDWARE = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "hardware stack error",
    "gpu has fallen off the bus",
    "gpu is lost",
    "contained memory error",
    "device(s) is/are busy or unavailable",
)
"""Substrings of CUDA errors, in lower case. Illegal accesses are not included: the script may cause them."""

GroupChoice = Literal["auto", "gloo", "nccl"]

_HERE = b"nccl\0"


def own_device(local_rank: int) -> torch.device:
    """Return the device for a worker with this local rank: a GPU, shared in turn if there are fewer, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def device_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.device | None:
    """Return the one device of all parameters, None without parameters; raise ConfigError if there are two."""
    found: dict[torch.device, str] = {}
    for name, tensor in tensors:
        found.setdefault(tensor.device, name)
    for device in found:
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"parameter {found[device]} is on {device}: only the CPU and CUDA devices are supported")
    if len(found) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in list(found.items())[:2])
        raise ConfigError(f"parameters are on several devices ({places}): put the whole model on job.device")
    return next(iter(found), None)


def make_scales(registered: Iterable[object], device: torch.device) -> None:
    """Make gradient scalers create their device tensors, which they otherwise do with their first loss.

    A joiner may have to make updates before it computes a loss.
    """
    for item in registered:
        if isinstance(item, torch.amp.GradScaler) and item.is_enabled():
            item.scale(torch.zeros((), device=device))


def between_devices(choice: GroupChoice, device: torch.device) -> torch.device | None:
    """Return the device whose tensors the group carries itself; None: they go through host memory, by Gloo."""
    if choice == "nccl" and device.type != "cuda":
        raise ConfigError(f"--group nccl is for models on CUDA devices, and this one is on {device}: use --group auto")
    return device if device.type == "cuda" and choice != "gloo" else None


def is_hardware_fault(error: BaseException | None) -> bool:
    """Return whether CUDA's message shows that a device failed; also checks causes and contexts."""
    while error is not None:
        text = str(error).lower()
        if any(each in text for each in _OF_HARDWARE):
            return True
        error = error.__cause__ or error.__context__
    return False


@functools.cache
def warm_up(device: torch.device) -> None:
    """Do NCCL's one-time initialization on a thread, while the script prepares its first step."""
    prepare_nccl(torch.cuda.device_count())
    threading.Thread(target=_use_once, args=(device,), name="craft-nccl", daemon=True).start()


def _use_once(device: torch.device) -> None:
    try:
        torch.cuda.init()
        Communicator(unique_id(), 0, 1, device).abort()
    except (NcclError, RuntimeError) as error:
        # The first group will fail with this, too, where the error can be handled.
        logger.info("NCCL could not be made ready beforehand: %s", error)


def connect_devices(gloo: GlooGroup, device: torch.device) -> NcclGroup:
    """Add NCCL to a group; block until all members do so. Raises ConfigError if some have no device."""
    prepare_nccl(torch.cuda.device_count())
    try:
        own = _HERE + (unique_id() if gloo.rank == 0 else b"")
    except NcclError as error:
        raise GroupBroken(f"generation {gloo.generation} did not meet: {error}", gloo.generation) from error
    # A member without a device sends another message here, and so detects the difference, too.
    parts = gather(gloo, own)
    if not all(part.startswith(_HERE) for part in parts):
        raise ConfigError(DIFFERENT_DEVICES)
    return NcclGroup(gloo, device, parts[0].removeprefix(_HERE))


DIFFERENT_DEVICES = "some workers have their model on the CPU and others on a GPU: put it on job.device in every worker"
