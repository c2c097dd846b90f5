"""The job of ``train.py``, in which a worker once does to its device what no process gets over, or has a device that hangs."""

import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from craft.groups.nccl_calls import Communicator

kind, once, script = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
sys.argv = sys.argv[3:]
original = F.cross_entropy
calls: list[int] = []


def fail_an_assertion() -> None:
    """An index that is out of bounds, found by the kernel itself."""
    torch.zeros(4, device="cuda")[torch.tensor([1 << 30], device="cuda")].sum().item()


def access_illegally() -> None:
    """Memory that was given back to the driver, read through what still points there."""
    whole = torch.zeros(1 << 25, device="cuda")
    place = {"data": (whole.data_ptr(), False), "shape": (1 << 25,), "typestr": "<f4", "version": 2}
    stale = torch.as_tensor(type("Stale", (), {"__cuda_array_interface__": place})(), device="cuda")
    del whole
    torch.cuda.empty_cache()
    stale.sum().item()


def is_the_one() -> bool:
    if os.environ["LOCAL_RANK"] != "1" or once.exists():
        return False
    once.touch()
    return True


def cross_entropy(*given: Any) -> torch.Tensor:
    calls.append(1)
    if len(calls) == 20 and is_the_one():
        {"assert": fail_an_assertion, "illegal": access_illegally}[kind]()
    return original(*given)


def abort(communicator: Communicator) -> None:
    """As where the device does not answer any more; of a group, not of what only made NCCL ready."""
    if threading.current_thread().name.startswith("craft-abort-") and is_the_one():
        threading.Event().wait()
    whole_abort(communicator)


whole_abort = Communicator.abort
if kind == "hangs":
    setattr(Communicator, "abort", abort)  # noqa: B010  (a method is not to be assigned)
else:
    vars(F)["cross_entropy"] = cross_entropy
runpy.run_path(script, run_name="__main__")
