"""Probe torch on this host: ``python -m craft.doctor.torch_probe`` prints a ``Torch`` as JSON.

``craft doctor`` runs it as a process, because the command line does not import torch and must not hang with it.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from craft.doctor.findings import Device, Torch
from craft.groups.gloo import GlooGroup
from craft.groups.rendezvous import RendezvousStore
from craft.protocol.errors import GroupError
from craft.protocol.membership import Generation, Member
from craft.wire.peers import KEY_BYTES

_LIMIT_S = 10.0
_KEY = secrets.token_bytes(KEY_BYTES)
"""Key of a job that exists only in this process."""
_COPY_BYTES = 256 << 20
_COPIES = 5


def probe() -> Torch:
    """Read torch's versions, try an abort, measure the GPUs."""
    abort_ms, error = _abort_ms()
    has_cuda = torch.cuda.is_available()
    return Torch(
        version=str(torch.__version__),
        threads=torch.get_num_threads(),
        abort_ms=abort_ms,
        abort_error=error,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
        devices=tuple(_device(number) for number in range(torch.cuda.device_count())) if has_cuda else (),
    )


def _abort_ms() -> tuple[float | None, str]:
    """Block in a receive without a sender, abort it from another thread, and time the abort."""
    groups = _pair()
    if groups is None:
        return None, "two members in one process did not meet"
    freed = threading.Event()
    blocked = threading.Thread(target=_blocked, args=(groups[0], freed), daemon=True)
    blocked.start()
    # Long enough for the thread to block; if it does not yet, the abort has to free it just the same.
    blocked.join(0.1)
    began = time.monotonic()
    groups[0].abort()
    came = freed.wait(_LIMIT_S)
    took = (time.monotonic() - began) * 1e3
    groups[1].abort()
    return (took, "") if came else (None, f"it was still blocked after {_LIMIT_S:g} s")


def _pair() -> tuple[GlooGroup, GlooGroup] | None:
    store = RendezvousStore("127.0.0.1", _KEY)
    members = tuple(Member(worker_id=f"w{rank}", store_port=store.port) for rank in range(2))
    generation = Generation(number=1, nonce="fitness", members=members)
    groups: dict[int, GlooGroup] = {}

    def meet(rank: int) -> None:
        groups[rank] = GlooGroup(generation, rank, "127.0.0.1", _KEY, _LIMIT_S)

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
    return (groups[0], groups[1]) if len(groups) == 2 else None


def _blocked(group: GlooGroup, freed: threading.Event) -> None:
    try:
        group.recv(torch.zeros(1), 1, 1).wait()
    except GroupError:
        freed.set()


def _device(number: int) -> Device:
    free, total = torch.cuda.mem_get_info(number)
    count = min(_COPY_BYTES, free // 4)
    here = torch.empty(count, dtype=torch.uint8, device=f"cuda:{number}")
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    return Device(
        name=torch.cuda.get_device_name(number),
        free_bytes=free,
        total_bytes=total,
        to_host_gb_s=_gb_s(number, count, lambda: host.copy_(here, non_blocking=True)),
        to_device_gb_s=_gb_s(number, count, lambda: here.copy_(host, non_blocking=True)),
    )


def _gb_s(number: int, count: int, copy: Callable[[], object]) -> float:
    copy()
    torch.cuda.synchronize(number)
    began = time.monotonic()
    for _ in range(_COPIES):
        copy()
    torch.cuda.synchronize(number)
    return _COPIES * count / 1e9 / (time.monotonic() - began)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe()) + b"\n")
    sys.stdout.flush()
    # Skip Gloo's destructors: one of its threads that still runs would make this exit with an error.
    os._exit(0)
