"""Everything that is promised of jobs on GPUs, measured on one: recovery, overhead, replacement, snapshots.

The workers share one GPU. ``PYTHONPATH=src:.carried:. python3 -m bench.gpu --out FOLDER`` on a machine with a CUDA build of
torch; each part is written as soon as it is there, so that a limit on time costs only what comes after it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench.commits import Commit, recovery_of, steady
from bench.jobs import CraftJob, JobFailed, exit_on_sigterm

WORKERS = 3
START_LIMIT_S = 120.0
SHAPES = {"tiny": ["--length", "64"], "small": ["--length", "256"], "1b": ["--length", "512"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=list(PARTS))
    parser.add_argument("--faults", type=int, default=10, help="of each kind, in the small model's job")
    parser.add_argument("--large-faults", type=int, default=4)
    args = parser.parse_args()
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
    for name in args.parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="craft-bench-", dir="/dev/shm") as folder:
            try:
                result[name] = PARTS[name](args, Path(folder))
            except Exception as error:  # noqa: BLE001  (each part for itself)
                result[name] = {"failed": repr(error)[-3000:]}
        result[name]["took_s"] = time.monotonic() - began
        (args.out / "gpu.json").write_text(json.dumps(result, indent=1))
        print(name, json.dumps(result[name])[:2500], flush=True)


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


def overhead(size: str, pairs: int, steps: int, folder: Path, **settings: str) -> dict[str, Any]:
    os.environ.update(settings)
    out = folder / "blocks.json"
    counts = ["--pairs", str(pairs), "--steps-per-block", str(steps)]
    arguments = ["--size", size, *SHAPES[size], *counts, "--meet", str(folder / "meet"), "--out", str(out)]
    with CraftJob(folder / "job", "gpu_overhead.py", arguments, WORKERS) as job:
        job.wait(240)
    for name in settings:
        del os.environ[name]
    found: dict[str, Any] = json.loads(out.read_text())
    return {"size": size, "steps_per_block": steps, "settings": settings, **found}


class Disturbed:
    """A job that loses workers, each replaced before the next one is lost, and is told to stop in the end."""

    def __init__(self, size: str, folder: Path, options: list[str]) -> None:
        self.size = size
        self._stop = folder / "stop"
        self._folder = folder
        arguments = ["--size", size, *SHAPES[size], "--stop", str(self._stop)]
        self.job = CraftJob(folder / "job", "gpu_job.py", arguments, WORKERS, options)
        self._random = random.Random(0)

    def settle(self, commits: int) -> set[str]:
        """Wait until all workers have so many undisturbed commits; return who they are."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            rows = {name: found for name, found in self.job.commits().items() if found}
            newest = max((each[-1].generation for each in rows.values()), default=0)
            # The dead do not count: their last commits look as steady as any.
            living = {name: each for name, each in rows.items() if each[-1].generation == newest}
            found = {name for name, each in living.items() if steady(each, WORKERS, commits)}
            if len(found) == WORKERS:
                return found
            if not self.job.running or time.monotonic() > deadline:
                raise JobFailed(f"no {commits} undisturbed commits of {WORKERS} workers\n{self.job.log_tail()}")
            time.sleep(0.05)

    def lose(self, number: signal.Signals, commits: int) -> dict[str, Any]:
        """Lose one worker at a random moment; return what that cost the others, and how the next one came."""
        names = self.settle(commits)
        pids = {member.name: member.pid for member in self.job.members()}
        victim = self._random.choice(sorted(names))
        time.sleep(self._random.uniform(0.0, 0.3))
        struck = time.time()
        os.kill(pids[victim], number)
        survivors = names - {victim}
        deadline = time.monotonic() + START_LIMIT_S
        while (cost := recovery_of(struck, {name: self.job.commits()[name] for name in survivors})) is None:
            if not self.job.running or time.monotonic() > deadline:
                raise JobFailed(f"the survivors of {victim} do not go on\n{self.job.log_tail()}")
            time.sleep(0.02)
        after = self.settle(3)
        (joiner,) = after - survivors
        return {
            "signal": number.name,
            "recovery_s": cost.recovery_s,
            "step_s": cost.step_s,
            "survivors_slowest_s": self._slowest(survivors, struck + cost.recovery_s, joiner),
            **self._joined(joiner),
        }

    def _slowest(self, survivors: set[str], since: float, joiner: str) -> float:
        """The survivors' slowest step from their first commit after the loss until the joiner keeps pace."""
        level = self.job.commits()[joiner][0].time_s
        worst = 0.0
        for name in survivors:
            rows = [row.time_s for row in self.job.commits()[name] if since <= row.time_s <= level + 1.0]
            worst = max([worst, *(later - earlier for earlier, later in pairwise(rows))])
        return worst

    def _joined(self, joiner: str) -> dict[str, float]:
        """Seconds from the start of the joiner's process: until it had the state, and until its first commit."""
        pid = next(member.pid for member in self.job.members() if member.name == joiner)
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = float(Path("/proc/uptime").read_text().split()[0])
        started = time.time() - boot + ticks / os.sysconf("SC_CLK_TCK")
        log = (self._folder / "job" / "run" / "workers" / joiner / "log").read_text()
        marks = {"steps_s": "trains on", "state_s": "took the state", "level_s": "keeps pace"}
        found = {name: _told(log, words) - started for name, words in marks.items()}
        return {"first_commit_s": self.job.commits()[joiner][0].time_s - started, **found}

    def end(self) -> dict[str, Any]:
        """Stop, and compare the last state with that of one worker that was never disturbed."""
        self._stop.touch()
        self.job.wait(60)
        steps, digest = finished(self.job)
        shape = ["--size", self.size, *SHAPES[self.size], "--steps", str(steps)]
        reference = CraftJob(self._folder / "reference", "gpu_job.py", shape, 1)
        with reference:
            reference.wait(240)
            expected = finished(reference)
        return {"steps": steps, "same_bits": (steps, digest) == expected}


def _told(log: str, words: str) -> float:
    """When a worker first wrote a line with these words into its log."""
    line = next((line for line in log.splitlines() if words in line), None)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() if line is not None else math.nan


def finished(job: CraftJob) -> tuple[int, str]:
    """How many steps a job committed, and the digest that all its workers ended with."""
    digests = {line["digest"] for line in job.journal() if line.get("event") == "WorkerFinished"}
    assert len(digests) == 1, digests
    return max(row.step for rows in job.commits().values() for row in rows) + 1, digests.pop()


def recovery_small(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    disturbed = Disturbed("small", folder, [])
    faults = []
    with disturbed.job:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for _ in range(args.faults):
                faults.append(disturbed.lose(number, 8))
        return {"faults": faults, **disturbed.end()}


def large(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The model of a billion parameters: snapshots in an undisturbed stretch, then losses."""
    every = 3
    store = ["--checkpoints", str(folder / "store"), "--checkpoint-every", f"{every} steps", "--checkpoint-keep", "1"]
    disturbed = Disturbed("1b", folder, store)
    with disturbed.job:
        disturbed.settle(4)
        names = disturbed.settle(5 * every + 2)
        taken = {line["step"] for line in disturbed.job.journal() if line.get("event") == "CheckpointWritten"}
        steps = snapshot_steps(disturbed.job.commits()[min(names)], taken)
        faults = [
            disturbed.lose(number, 4)
            for number in (signal.SIGKILL, signal.SIGSTOP)
            for _ in range(args.large_faults // 2)
        ]
        return {"snapshots": steps, "faults": faults, **disturbed.end()}


def snapshot_steps(commits: list[Commit], taken: set[int]) -> dict[str, Any]:
    """Seconds of steps during which a snapshot was copied, and of the others."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    for earlier, later in pairwise(commits[3:]):
        # A checkpoint of so many steps is copied beside the step that follows them, which has that number.
        kind = "with" if later.step in taken else "without"
        times[kind].append(later.time_s - earlier.time_s)
    return {
        **times,
        "median_with": statistics.median(times["with"]),
        "median_without": statistics.median(times["without"]),
    }


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "bandwidths": lambda args, folder: bandwidths(),
    "overhead-small": lambda args, folder: overhead("small", 16, 6, folder),
    # As many channels to a peer as suit torch's all-reduce over sockets best; the default suits it badly.
    "overhead-small-tuned": lambda args, folder: overhead("small", 16, 6, folder, NCCL_NCHANNELS_PER_NET_PEER="4"),
    "overhead-1b": lambda args, folder: overhead("1b", 10, 2, folder),
    "recovery-small": recovery_small,
    "large": large,
}


if __name__ == "__main__":
    main()
