"""Which device a worker trains on, and how the devices of the members of a generation are connected."""

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
from craft.settings.environ.nccl import prepare
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
"""In what CUDA says, in lower case. An illegal access is not among them: it may be the script's."""

GroupChoice = Literal["auto", "gloo", "nccl"]

_HERE = b"nccl\0"


def own_device(local_rank: int) -> torch.device:
    """Where a worker of this place on its host trains: on a GPU where there is one, in turn where there are fewer."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def device_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.device | None:
    """The one device of all parameters; raises ConfigError if there are two. None: there are no parameters."""
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
    """Have gradient scalers make what they keep on the device. They do so with their first loss.

    A worker that joins may have to make updates before it computes any.
    """
    for item in registered:
        if isinstance(item, torch.amp.GradScaler) and item.is_enabled():
            item.scale(torch.zeros((), device=device))


def between_devices(choice: GroupChoice, device: torch.device) -> torch.device | None:
    """The device whose tensors a group is to carry itself; None: they go through the memory of the host, by Gloo."""
    if choice == "nccl" and device.type != "cuda":
        raise ConfigError(f"--group nccl is for models on CUDA devices, and this one is on {device}: use --group auto")
    return device if device.type == "cuda" and choice != "gloo" else None


def is_hardware_fault(error: BaseException | None) -> bool:
    """Whether a device failed, by what CUDA said; also where something else was raised because of it."""
    while error is not None:
        text = str(error).lower()
        if any(each in text for each in _OF_HARDWARE):
            return True
        error = error.__cause__ or error.__context__
    return False


@functools.cache
def warm_up(device: torch.device) -> None:
    """Let NCCL do what it does once in a process, on a thread beside whatever the script does before its first step."""
    prepare(torch.cuda.device_count())
    threading.Thread(target=_use_once, args=(device,), name="craft-nccl", daemon=True).start()


def _use_once(device: torch.device) -> None:
    try:
        torch.cuda.init()
        Communicator(unique_id(), 0, 1, device).abort()
    except (NcclError, RuntimeError) as error:
        # The first group will say so, too, to somebody who can do something about it.
        logger.info("NCCL could not be made ready beforehand: %s", error)


def connect_devices(gloo: GlooGroup, device: torch.device) -> NcclGroup:
    """Add NCCL to a group; blocks until all members do so. Raises ConfigError if some have no device to connect."""
    prepare(torch.cuda.device_count())
    try:
        own = _HERE + (unique_id() if gloo.rank == 0 else b"")
    except NcclError as error:
        raise GroupBroken(f"generation {gloo.generation} did not meet: {error}", gloo.generation) from error
    # A member that has none comes with something else at this place, and finds something else than it expected.
    parts = gather(gloo, own)
    if not all(part.startswith(_HERE) for part in parts):
        raise ConfigError(DIFFERENT_DEVICES)
    return NcclGroup(gloo, device, parts[0].removeprefix(_HERE))


DIFFERENT_DEVICES = "some workers have their model on the CPU and others on a GPU: put it on job.device in every worker"
