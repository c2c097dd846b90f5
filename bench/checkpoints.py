"""Measures what checkpoints cost: CRAFT's beside torch.save and torch.distributed.checkpoint's async_save.

Two processes, each with the whole training state of a transformer, half of it frozen: 0.5 GB. In each round every system saves
the same state once, in turns. Then CRAFT's writing is held against ``dd`` with fsync, and its reading against reading the same
files, both with cold caches. Example, a quick try:

    python bench/checkpoints.py --rounds 3 --disk-rounds 2 --layers 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.jobs import exit_on_sigterm
from bench.report import environment, finish

from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.restore import restore
from craft.snapshots.checkpoint.writer import CheckpointShare, CheckpointWriter
from craft.snapshots.state.serialized import State
from craft.snapshots.store.manifest import name_of
from craft.snapshots.store.tiers import open_tiers

WORKERS = 2
WIDTH = 768
LIMIT_S = 300.0
KEEP = 1


class Worker:
    """One of two processes that train. Each method is one answer to the director, which asks both at once."""

    def __init__(self, rank: int, layers: int, folder: Path) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.rank = rank
        self.folder = folder
        self.model = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.moving = list(self.model[layers // 2 :].parameters())
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
        self.writer: CheckpointWriter | None = None
        share = self.state().header.total_bytes // WORKERS
        self.source, self.target = (torch.ones(share, dtype=torch.uint8) for _ in range(2))

    def state(self) -> State:
        return State({"model": self.model}, {"optimizer": self.optimizer}, b"")

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def step(self, everything: bool) -> None:
        """Change what trains, or all there is."""
        for parameter in self.model.parameters() if everything else self.moving:
            values = self.optimizer.state[parameter]
            for tensor in (parameter, values["exp_avg"], values["exp_avg_sq"]):
                tensor.add_(1e-3)

    def memcpy(self, number: int) -> dict[str, float]:
        begin = time.perf_counter()
        self.target.copy_(self.source)
        return {"stall_s": time.perf_counter() - begin, "bytes": len(self.source)}

    def craft(self, number: int) -> dict[str, float]:
        if self.writer is None:
            self.writer = CheckpointWriter(
                open_tiers(str(self.folder / "craft")), f"w{self.rank}", KEEP, lambda event: None
            )
        begin = time.perf_counter()
        self.writer.take(
            self.state(), CheckpointShare(name_of(0, number, "bench"), 0, number, 1, None, self.rank, WORKERS)
        )
        stall_s = time.perf_counter() - begin
        assert self.writer.wait(LIMIT_S)
        return {"stall_s": stall_s, "write_s": self.writer.write_s}

    def torch_save(self, number: int) -> dict[str, float]:
        begin = time.perf_counter()
        path = self.folder / "torch_save.pt"
        if self.rank == 0:
            torch.save(self.state_dict(), path)
        dist.barrier()
        stall_s = time.perf_counter() - begin
        return {"stall_s": stall_s, "bytes": path.stat().st_size if self.rank == 0 else 0}

    def dcp(self, number: int) -> dict[str, float]:
        path = self.folder / "dcp"
        begin = time.perf_counter()
        scheduler: Any = async_save(self.state_dict(), checkpoint_id=str(path))
        stall_s = time.perf_counter() - begin
        scheduler.result()
        dist.barrier()
        size = sum(file.stat().st_size for file in path.iterdir()) if self.rank == 0 else 0
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)
        return {"stall_s": stall_s, "bytes": size}

    def forget(self) -> None:
        """An empty store, so that everything is written again."""
        if self.rank == 0:
            shutil.rmtree(self.folder / "craft")

    def restore(self) -> dict[str, float]:
        tiers = open_tiers(str(self.folder / "craft"))
        begin = time.perf_counter()
        found = restore(tiers, candidates(tiers)[0])
        return {"seconds": time.perf_counter() - begin, "bytes": found.header.total_bytes}


def work(director: Connection, rank: int, layers: int, folder: Path) -> None:
    worker = Worker(rank, layers, folder)
    director.send("ready")
    while True:
        what, *arguments = director.recv()
        director.send(getattr(worker, what)(*arguments))


class Pair:
    """The two processes, as the director sees them."""

    def __init__(self, layers: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines = []
        self._processes = []
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, rank, layers, folder), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)
        assert [line.recv() for line in self._lines] == ["ready"] * WORKERS

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """Ask both at once."""
        for line in self._lines:
            line.send((what, *arguments))
        return [line.recv() for line in self._lines]

    def ask_first(self, what: str, *arguments: Any) -> Any:
        self._lines[0].send((what, *arguments))
        return self._lines[0].recv()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def drop_caches() -> bool:
    """Let both sides read from the disk; False if this is not allowed here: then both read from memory."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return False
    return True


def save_rounds(pair: Pair, folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every system saves the same state once in each round."""
    found: dict[str, list[dict[str, float]]] = {"memcpy": [], "craft": [], "torch_save": [], "dcp": []}
    # Once for nothing: memory that was never touched, and code that was never loaded, would count for the first round only.
    for system in found:
        pair.ask(system, 0)
    pair.ask("forget")
    for number in range(rounds):
        pair.ask("step", False)
        systems = [*found][number % len(found) :] + [*found][: number % len(found)]
        for system in systems:
            # What another one has left for the disk to write is not this one's.
            os.sync()
            answers = pair.ask(system, number)
            stall_s = max(answer["stall_s"] for answer in answers)
            if system == "craft":
                (manifest,) = [each for each in candidates(open_tiers(str(folder / "craft"))) if each.step == number]
                size = float(manifest.new_bytes)
            else:
                size = sum(answer["bytes"] for answer in answers)
            found[system].append({"stall_s": stall_s, "bytes": size})
            print(f"{number}, {system}: {stall_s * 1e3:.1f} ms, {size / 1e6:.0f} MB", flush=True)
    return found


def disk_rounds(pair: Pair, folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """CRAFT's writing and dd's, CRAFT's reading and that of the same files, in turns."""
    found: dict[str, list[dict[str, float]]] = {"write": [], "dd": [], "restore": [], "read": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        source = Path(memory) / "source"
        for number in range(rounds):
            pair.ask("forget")
            pair.ask("step", True)
            os.sync()
            answers = pair.ask("craft", 1000 + number)
            seconds = max(answer["write_s"] for answer in answers)
            tiers = open_tiers(str(folder / "craft"))
            total = candidates(tiers)[0].total_bytes
            found["write"].append({"seconds": seconds, "bytes": total})
            if not source.exists():
                source.write_bytes(os.urandom(total // WORKERS))
            found["dd"].append({"seconds": run_dd(source, folder), "bytes": total})
            for name in ("restore", "read")[:: -1 if number % 2 else 1]:
                cold = drop_caches()
                chunks = folder / "craft" / "chunks"
                figures = pair.ask_first("restore") if name == "restore" else read_files(chunks)
                found[name].append({**figures, "cold": cold})
            speeds = {name: each[-1]["bytes"] / each[-1]["seconds"] / 1e6 for name, each in found.items()}
            print(number, ", ".join(f"{name} {speed:.0f} MB/s" for name, speed in speeds.items()), flush=True)
    return found


def run_dd(source: Path, folder: Path) -> float:
    """Seconds that as many dd as there are workers take to write the same, at once."""
    os.sync()
    targets = [folder / f"dd{number}" for number in range(WORKERS)]
    begin = time.perf_counter()
    running = [
        subprocess.Popen(["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync"], stderr=subprocess.DEVNULL)
        for target in targets
    ]
    for each in running:
        assert each.wait() == 0
    seconds = time.perf_counter() - begin
    for target in targets:
        target.unlink()
    return seconds


def read_files(folder: Path) -> dict[str, float]:
    buffer = bytearray(8 << 20)
    begin, size = time.perf_counter(), 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    size += count
    return {"seconds": time.perf_counter() - begin, "bytes": size}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="checkpoints of each system")
    parser.add_argument("--disk-rounds", type=int, default=8, help="writes and reads against the plain disk")
    parser.add_argument("--layers", type=int, default=6, help="of the transformer; 6 make 0.5 GB")
    parser.add_argument("--dir", type=Path, default=None, help="where checkpoints go; by default below this folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> int:
    args = parse()
    exit_on_sigterm()
    result: dict[str, Any] = {"benchmark": "checkpoints", "environment": environment(), "failed": []}
    with tempfile.TemporaryDirectory(dir=args.dir or Path(__file__).parent, prefix="checkpoints-") as name:
        folder = Path(name)
        pair = Pair(args.layers, folder)
        try:
            result["saves"] = save_rounds(pair, folder, args.rounds)
            result["disk"] = disk_rounds(pair, folder, args.disk_rounds)
        finally:
            pair.end()
    result["settings"] = {"rounds": args.rounds, "disk_rounds": args.disk_rounds, "layers": args.layers}
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
