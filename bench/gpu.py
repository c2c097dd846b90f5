"""Everything that is promised of jobs on GPUs, measured on one: recovery, overhead, replacement, snapshots.

The workers share one GPU. ``PYTHONPATH=src:.carried:. python3 -m bench.gpu --out FOLDER`` on a machine with a CUDA build of
torch; each part is written as soon as it is there, so that a limit on time costs only what comes after it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench import gpu_report
from bench.gpu_faults import SHAPES, WORKERS, Disturbed, finished, snapshot_steps
from bench.gpu_hold import hold
from bench.jobs import CraftJob, JobFailed, exit_on_sigterm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=[name for name in PARTS if name not in ON_DEMAND])
    parser.add_argument("--faults", type=int, default=10, help="of each kind, in the small model's job")
    parser.add_argument("--large-faults", type=int, default=10, help="of each kind, in the large model's job")
    parser.add_argument("--snapshots", type=int, default=5)
    parser.add_argument("--hold-sizes", nargs="*", default=["small", "1b"], help="of the part hold")
    parser.add_argument(
        "--limit-s", type=float, default=gpu_report.LIMIT_S, help="parts that would begin later are left out"
    )
    args = parser.parse_args()
    began = time.monotonic()
    exit_on_sigterm()
    # The same for both sides. CRAFT sets the last one itself, but here DDP would use NCCL before it.
    os.environ.update(
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        NCCL_P2P_NET_CHUNKSIZE=str(1 << 20),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"benchmark": "gpu", "environment": environment()}
    result["environment"]["sockets, but for the comparison with DDP"] = SOCKETS
    text = ""
    for name in args.parts:
        args.deadline = began + SHARE[name] * args.limit_s
        if time.monotonic() > args.deadline:
            print(f"{name}: there is no time left for it", flush=True)
            continue
        part_began = time.monotonic()
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="craft-bench-", dir="/dev/shm"))
            stack.enter_context(patch.dict(os.environ, SOCKETS if name in SIZE_OF else {}))
            try:
                result[name] = PARTS[name](args, Path(folder), result)
            except Exception as error:  # noqa: BLE001  (each part for itself)
                result[name] = {"failed": repr(error)[-3000:]}
        result[name]["took_s"] = time.monotonic() - part_began
        result["took_s"] = time.monotonic() - began
        (args.out / "gpu.json").write_text(json.dumps(result, indent=1))
        text = gpu_report.write(result, args.out)
        print(f"{name}: {result[name]['took_s']:.0f} s", flush=True)
    print(text)


def environment() -> dict[str, Any]:
    from craft.groups import nccl_calls

    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": nccl_calls.version(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }


def bandwidths() -> dict[str, Any]:
    """In GB/s: between host and device, and from two processes to one over loopback."""
    size = 2 << 30
    device, host = torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.zeros(size, dtype=torch.uint8)
    pinned = host.pin_memory()
    found: dict[str, Any] = {}
    for name, (to, by) in {
        "to_host": (pinned, device),
        "to_device": (device, pinned),
        "pageable": (device, host),
    }.items():
        torch.cuda.synchronize()
        began = time.perf_counter()
        to.copy_(by)
        torch.cuda.synchronize()
        found[name] = size / (time.perf_counter() - began) / 1e9
    server = socket.create_server(("127.0.0.1", 0), backlog=2)
    place = f"s.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
    code = f"import socket as s; c = {place}; d = bytearray(1 << 24)\nfor _ in range(128): c.sendall(d)"
    senders = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    ends = [server.accept()[0] for _ in senders]
    room = memoryview(host.numpy())  # type: ignore[arg-type]
    began = time.perf_counter()
    threads = [threading.Thread(target=_receive, args=(end, room[number << 30 :])) for number, end in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["loopback"] = 2 * (128 << 24) / (time.perf_counter() - began) / 1e9
    for sender in senders:
        sender.wait()
    return found


def _receive(end: socket.socket, room: memoryview) -> None:
    left = 128 << 24
    while left:
        left -= end.recv_into(room[: 1 << 24], min(left, 1 << 24))


def overhead(size: str, pairs: int, steps: int, folder: Path) -> dict[str, Any]:
    out = folder / "blocks.json"
    counts = ["--pairs", str(pairs), "--steps-per-block", str(steps)]
    arguments = ["--size", size, *SHAPES[size], *counts, "--meet", str(folder / "meet"), "--out", str(out)]
    with CraftJob(folder / "job", "gpu_overhead.py", arguments, WORKERS) as job:
        job.wait(240)
    found: dict[str, Any] = json.loads(out.read_text())
    return {"size": size, "steps_per_block": steps, **found}


def recovery_small(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    disturbed = Disturbed("small", folder, [])
    with disturbed.job:
        disturbed.settle(20)
        return {"faults": lose(disturbed, args.faults, 2, args.deadline), **ended(disturbed)}


def lose(disturbed: Disturbed, times: int, commits: int, deadline: float) -> list[dict[str, Any]]:
    """So many losses of each kind, in turn; fewer if there is no time."""
    faults: list[dict[str, Any]] = []
    for number in [signal.SIGKILL, signal.SIGSTOP] * times:
        if time.monotonic() > deadline:
            break
        try:
            faults.append(disturbed.lose(number, commits))
        except JobFailed as error:
            # What was measured before counts, and the end will show that this was not.
            print(error, flush=True)
            break
        print(json.dumps(faults[-1]), flush=True)
    return faults


def ended(disturbed: Disturbed) -> dict[str, Any]:
    try:
        return disturbed.end()
    except (JobFailed, AssertionError) as error:
        return {"did_not_end": repr(error)[-3000:]}


def large(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The model of a billion parameters: snapshots in an undisturbed stretch, then losses."""
    store = ["--checkpoints", str(folder / "store"), "--checkpoint-every", "1000000 steps", "--checkpoint-keep", "1"]
    disturbed = Disturbed("1b", folder, store)
    with disturbed.job:
        # In the first steps memory is pinned, for checkpoints and for whoever joins.
        name = min(disturbed.settle(7))
        first, taken = len(disturbed.job.commits()[name]), []
        disturbed.settle_more(4)
        for _ in range(args.snapshots):
            taken.append(disturbed.checkpoint())
            disturbed.settle_more(1)
        steps = snapshot_steps(disturbed.job.commits()[name][first - 1 :], taken)
        faults = lose(disturbed, args.large_faults, 1, args.deadline)
        return {"snapshots": steps, "faults": faults, **ended(disturbed)}


def bits(args: argparse.Namespace, folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Compare how the disturbed jobs ended with one worker each that was never disturbed, both at the same time."""
    sizes = {name: size for name, size in SIZE_OF.items() if "digest" in result.get(name, {})}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        jobs = {}
        for name, size in sizes.items():
            arguments = ["--size", size, *SHAPES[size], "--steps", str(result[name]["steps"])]
            jobs[name] = CraftJob(folder / name, "gpu_job.py", arguments, 1)
            stack.enter_context(jobs[name])
        for name, job in jobs.items():
            job.wait(150)
            found[name] = finished(job) == (result[name]["steps"], result[name]["digest"])
    return found


PARTS: dict[str, Callable[[argparse.Namespace, Path, dict[str, Any]], dict[str, Any]]] = {
    "bandwidths": lambda args, folder, result: bandwidths(),
    "large": lambda args, folder, result: large(args, folder),
    "recovery-small": lambda args, folder, result: recovery_small(args, folder),
    "bits": bits,
    "overhead-1b": lambda args, folder, result: overhead("1b", 5, 1, folder),
    "overhead-small": lambda args, folder, result: overhead("small", 6, 5, folder),
}
PARTS["hold"] = lambda args, folder, result: hold(args.hold_sizes, folder, args.out, result["environment"])
ON_DEMAND = ("hold",)
"""What the run without --parts leaves out: it would take longer than its limit."""
SIZE_OF = {"large": "1b", "recovery-small": "small"}
SOCKETS = {"NCCL_NCHANNELS_PER_NET_PEER": "8", "NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "1"}
"""What NCCL is told where CRAFT trains alone: the loopback takes most of a step there, and faults are to fit into the limit.

Where it is compared with DDP, both have NCCL's defaults. DDP's steps became longer by these."""
SHARE = {"bandwidths": 1.0, "large": 0.6, "recovery-small": 0.8, "bits": 1.0, "overhead-1b": 0.9}
SHARE |= {"overhead-small": 0.95, "hold": 1.0}
"""Of the time limit: from then on no part of this name is begun, and none of its losses."""


if __name__ == "__main__":
    main()
