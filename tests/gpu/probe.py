"""What the design leans on, tried on a machine with a GPU: one line of JSON for each fact. No test: nothing here passes or fails.

Run from the root: ``PYTHONPATH=src:.carried:. python3 -m tests.gpu.probe``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from craft.groups import nccl_calls
from craft.groups.nccl_calls import Communicator

_LIMIT_S = 60.0
_MIB = 1 << 20


class Rank:
    """One process that shares the GPU; its methods are called by name."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        began = time.perf_counter()
        torch.zeros(1, device=self.device)
        self.context_s = time.perf_counter() - began
        self.stream = torch.cuda.Stream(self.device)
        self.comms: dict[str, Communicator] = {}

    def context(self) -> float:
        return self.context_s

    def unique_id(self) -> bytes:
        return nccl_calls.unique_id()

    def open(self, name: str, identity: bytes, rank: int, size: int) -> dict[str, float]:
        began = time.perf_counter()
        comm = Communicator(identity, rank, size, self.device)
        opened = time.perf_counter() - began
        one = torch.zeros(16, device=self.device)
        into = torch.zeros(size, 16, device=self.device)
        torch.cuda.current_stream().synchronize()
        peers = [peer for peer in range(size) if peer != rank]
        comm.swap([(one, peer) for peer in peers], [(into[peer], peer) for peer in peers], self.stream)
        self.stream.synchronize()
        self.comms[name], self.rank, self.size = comm, rank, size
        return {"init_s": opened, "with_first_swap_s": time.perf_counter() - began}

    def open_aside(self, name: str, identity: bytes, rank: int, size: int) -> bool:
        """Open on a thread that may be left behind; whether it came to an end within three seconds."""
        thread = threading.Thread(target=self.open, args=(name, identity, rank, size), daemon=True)
        thread.start()
        thread.join(3)
        return not thread.is_alive()

    def exchange(self, name: str, mib: int, times: int) -> dict[str, float]:
        """Blocks to the owners of chunks, a sum, the results to all; as a bucket of a step goes."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        chunk = mib * _MIB // self.size // 2
        own = torch.randn(self.size, chunk, device=self.device).bfloat16()
        inbox = torch.empty_like(own)
        result = torch.empty_like(own)
        torch.cuda.current_stream().synchronize()
        took, enqueued = [], []
        for _ in range(times):
            began = time.perf_counter()
            with torch.cuda.stream(self.stream):
                comm = self.comms[name]
                comm.swap([(own[p], p) for p in peers], [(inbox[p], p) for p in peers], self.stream)
                total = result[self.rank]
                total.copy_(own[self.rank])
                for peer in peers:
                    total.add_(inbox[peer])
                comm.swap([(total, p) for p in peers], [(result[p], p) for p in peers], self.stream)
            enqueued.append(time.perf_counter() - began)
            self.stream.synchronize()
            took.append(time.perf_counter() - began)
        return {"median_ms": 1e3 * sorted(took)[times // 2], "enqueue_ms": 1e3 * sorted(enqueued)[times // 2]}

    def block(self, name: str) -> None:
        """Begin an exchange in which a peer will not take part."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._own = torch.zeros(64 * _MIB, dtype=torch.uint8, device=self.device)
        self._into = [torch.zeros_like(self._own) for _ in peers]
        torch.cuda.current_stream().synchronize()
        receives = list(zip(self._into, peers, strict=True))
        self.comms[name].swap([(self._own, peer) for peer in peers], receives, self.stream)
        self._end = torch.cuda.Event()
        self._end.record(self.stream)

    def abort(self, name: str) -> dict[str, Any]:
        """Abort from another thread; watch the stream, and what a product takes on the main stream meanwhile."""
        blocked = not self._end.query()
        error = self.comms[name].error()
        factor = torch.randn(2048, 2048, device=self.device)
        torch.cuda.current_stream().synchronize()
        done: list[float] = []
        began = time.perf_counter()
        thread = threading.Thread(target=lambda: (self.comms[name].abort(), done.append(time.perf_counter() - began)))  # type: ignore[func-returns-value]
        thread.start()
        free_s, worst, launches = None, 0.0, 0
        while thread.is_alive() and time.perf_counter() - began < 20:
            start = time.perf_counter()
            factor @ factor
            launched = time.perf_counter() - start
            torch.cuda.current_stream().synchronize()
            worst, launches = max(worst, time.perf_counter() - start), launches + 1
            if free_s is None and self._end.query():
                free_s = time.perf_counter() - began
            del launched
        thread.join(20)
        free = self._end.query()
        del self._own, self._into
        return {"blocked": blocked, "error": error, "free_s": free_s, "free": free, "abort_s": done and done[0],
                "products": launches, "slowest_product_ms": 1e3 * worst}  # fmt: skip

    def products(self, seconds: float) -> float:
        """How many 4096-products a second."""
        factor = torch.randn(4096, 4096, device=self.device).bfloat16()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(20):
                factor @ factor
            torch.cuda.current_stream().synchronize()
            count += 20
        return count / (time.perf_counter() - began)

    def bits(self, deterministic: bool) -> str:
        """A hash of gradients of a small transformer block in bf16."""
        torch.use_deterministic_algorithms(deterministic)
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True).to(self.device)
        embed = torch.nn.Embedding(1000, 512).to(self.device)
        tokens = torch.randint(0, 1000, (8, 512), device=self.device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = layer(embed(tokens)).float().square().mean()
        loss.backward()
        hasher = hashlib.sha256()
        for param in [*layer.parameters(), *embed.parameters()]:
            assert param.grad is not None
            hasher.update(param.grad.cpu().numpy().tobytes())
        torch.use_deterministic_algorithms(False)
        return hasher.hexdigest()[:12]

    def copies(self, gib: int) -> dict[str, float]:
        size = gib << 30
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        found = {}
        began = time.perf_counter()
        pinned = torch.zeros(size, dtype=torch.uint8)
        found["touch_s_per_gib"] = (time.perf_counter() - began) / gib
        began = time.perf_counter()
        code = torch.cuda.cudart().cudaHostRegister(pinned.data_ptr(), size, 0)
        found["register_s_per_gib"] = (time.perf_counter() - began) / gib
        found["register_code"] = int(code)
        for name, (to, by) in {"to_host": (pinned, source), "to_device": (source, pinned)}.items():
            torch.cuda.current_stream().synchronize()
            began = time.perf_counter()
            to.copy_(by, non_blocking=True)
            found[f"{name}_returns_ms"] = 1e3 * (time.perf_counter() - began)
            torch.cuda.current_stream().synchronize()
            found[f"{name}_gib_s"] = gib / (time.perf_counter() - began)
        torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())
        return found


def _play(pipe: Any) -> None:
    rank = Rank()
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(rank, call)(*arguments)))
        except Exception as error:  # noqa: BLE001  (the edge of a process)
            pipe.send((False, repr(error)))


class Player:
    def __init__(self, number: int) -> None:
        os.environ["NCCL_HOSTID"] = f"probe-{number}-{time.time()}"
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_play, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, call: str, *arguments: Any) -> None:
        self.pipe.send((call, arguments))

    def answer(self) -> Any:
        if not self.pipe.poll(_LIMIT_S):
            raise TimeoutError("no answer")
        fine, value = self.pipe.recv()
        if not fine:
            raise RuntimeError(value)
        return value

    def ask(self, call: str, *arguments: Any) -> Any:
        self.tell(call, *arguments)
        return self.answer()


def _all(players: list[Player], call: str, *arguments: Any) -> list[Any]:
    for player in players:
        player.tell(call, *arguments)
    return [player.answer() for player in players]


def _open(players: list[Player], name: str) -> list[Any]:
    identity = players[0].ask("unique_id")
    for rank, player in enumerate(players):
        player.tell("open", name, identity, rank, len(players))
    return [player.answer() for player in players]


def _fact(name: str, find: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    try:
        value = find()
    except Exception as error:  # noqa: BLE001  (each fact for itself)
        value = f"FAILED {error!r}"
    print(json.dumps({name: value, "took_s": round(time.perf_counter() - began, 2)}), flush=True)
    return value


def _packages() -> dict[str, str]:
    names = (
        "torch msgspec aiohttp psutil prometheus-client blake3 fsspec click rich pytest pytest-timeout nvidia-ml-py"
        " matplotlib lightning pytorch-lightning numpy nvidia-nccl-cu13 nvidia-nccl-cu12"
    )
    found = {}
    for name in names.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _fork() -> str:
    """Whether a child of a process that has imported what the fork server imports can use the GPU."""
    code = (
        "import torch._dynamo, torch.utils.data, os, sys\n"
        "print('initialized', torch.cuda.is_initialized(), flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: print('child', float(torch.ones(2, device='cuda').sum()), flush=True)\n"
        "    except BaseException as e: print('child failed', e, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout


def main() -> None:
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    _fact("python", lambda: sys.version.split()[0])
    _fact("packages", _packages)
    _fact("nccl", nccl_calls.version)
    _fact("smi", lambda: subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.strip())
    _fact("memory", lambda: Path("/proc/meminfo").read_text().split("\n")[:3])
    _fact("fork", _fork)
    players = [Player(number) for number in range(3)]
    _fact("context_s", lambda: _all(players, "context"))
    _fact("open 3", lambda: _open(players, "a"))
    for mib in (1, 25, 256):
        _fact(f"exchange {mib} MiB, 3", partial(_all, players, "exchange", "a", mib, 20))
    _fact("open a second one beside it", lambda: _open(players, "b"))
    _fact("products alone", lambda: players[0].ask("products", 1.0))
    _fact("products of 3", lambda: _all(players, "products", 1.0))
    for deterministic in (False, True):
        for _ in range(2):
            _fact(f"bits, deterministic={deterministic}", partial(_all, players, "bits", deterministic))
    _fact("copies", lambda: players[0].ask("copies", 4))

    def kill() -> Any:
        _all(players[:2], "block", "a")
        os.kill(players[2].process.pid or 0, signal.SIGKILL)
        time.sleep(0.3)
        return _all(players[:2], "abort", "a")

    _fact("abort, peer killed", kill)
    _fact("open 2 survivors", lambda: _open(players[:2], "c"))
    _fact("exchange 25 MiB, 2", lambda: _all(players[:2], "exchange", "c", 25, 20))
    identity = players[0].ask("unique_id")
    _fact("opening ends without one who never comes", lambda: players[0].ask("open_aside", "x", identity, 0, 2))
    _fact("open beside that", lambda: _open(players[:2], "d"))
    third = Player(9)
    _fact("context of the third", lambda: third.ask("context"))
    trio = [*players[:2], third]
    _fact("open 3 again", lambda: _open(trio, "e"))

    def stop() -> Any:
        os.kill(third.process.pid or 0, signal.SIGSTOP)
        _all(players[:2], "block", "e")
        time.sleep(0.3)
        return _all(players[:2], "abort", "e")

    _fact("abort, peer stopped", stop)
    _fact("open 2 survivors", lambda: _open(players[:2], "f"))
    _fact("exchange 25 MiB, 2", lambda: _all(players[:2], "exchange", "f", 25, 20))
    for player in [*trio, *players]:
        player.process.kill()


if __name__ == "__main__":
    main()
