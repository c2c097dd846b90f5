"""Measures how fast the training state moves from one process to another: CRAFT beside torchft's HTTP transport.

A sender and a receiver, two processes, over the loopback interface; a new receiver for each transfer. Both systems move the
same model and optimizer, about 1 GB, and take turns. CRAFT checks and authenticates every byte on both sides; torchft does
neither. Example, a quick try:

    python bench/transfer.py --rounds 3 --layers 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.jobs import exit_on_sigterm
from bench.report import environment, finish

from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.state.serialized import State, carried_bytes, load, stripe_of
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import fetch

HERE = "127.0.0.1"
KEY = bytes(range(32))
LIMIT_S = 120.0
WIDTH = 768
WARM_UP = 1
"""Rounds that are left out."""


class Worker:
    """A transformer's parameters with AdamW's state: 12 bytes per parameter."""

    def __init__(self, layers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    @property
    def registered(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()
        self.optimizer.zero_grad()


def cpu_s() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def send(director: Connection, layers: int) -> None:
    """The process that has the state. Answers (what, argument) with a value."""
    from torchft.checkpointing.http_transport import HTTPTransport

    torch.set_num_threads(1)
    worker = Worker(layers, seed=1)
    worker.step()
    donors = [Donor(HERE, KEY) for _ in range(2)]
    # As torchft's Manager makes it: no chunks.
    transport: Any = HTTPTransport(timeout=timedelta(seconds=LIMIT_S), num_chunks=0)

    def reserve(parts: int) -> None:
        total_bytes = State(worker.modules, worker.registered, b"").header.total_bytes
        for part in range(parts):
            begin, end = stripe_of(total_bytes, part, parts)
            donors[part].reserve(end - begin)

    def stage(parts: int) -> dict[str, Any]:
        state_s, state = timed(lambda: State(worker.modules, worker.registered, b""))
        stage_s = [timed(lambda p=p: donors[p].stage("bench", 1, state, p, parts))[0] for p in range(parts)]  # type: ignore[misc]
        places = [(HERE, donor.port) for donor in donors[:parts]]
        return {"places": places, "bytes": state.header.total_bytes, "state_s": state_s, "stage_s": sum(stage_s)}

    def offer() -> dict[str, Any]:
        offer_s, _ = timed(lambda: transport.send_checkpoint([1], 1, worker.state_dict(), timedelta(seconds=LIMIT_S)))
        # By its number, so that no name server is asked; that would only cost torchft time.
        port = transport.metadata().rsplit(":", 1)[1]
        return {"metadata": f"http://{HERE}:{port}", "stage_s": offer_s}

    def release() -> None:
        for donor in donors:
            donor.release()
        transport.disallow_checkpoint()

    answers: dict[str, Callable[..., Any]] = {"reserve": reserve, "stage": stage, "offer": offer, "release": release}
    answers["cpu"] = cpu_s
    answers["carried"] = lambda: carried_bytes(State(worker.modules, worker.registered, b"").header)
    while True:
        what, *arguments = director.recv()
        director.send(answers[what](*arguments))


class Sender:
    """The other process, as the receiver sees it."""

    def __init__(self, layers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=send, args=(theirs, layers))
        self._process.start()
        theirs.close()

    def ask(self, what: str, *arguments: Any) -> Any:
        self._line.send((what, *arguments))
        return self._line.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def receive_craft(sender: Sender, layers: int, parts: int, reserved: bool) -> dict[str, float]:
    """One transfer by CRAFT, as a worker that joins makes it: into a model that is built already."""
    if reserved:
        sender.ask("reserve", parts)
    # A worker that joins knows from its agent how much will come, and sets memory aside while its script starts.
    reserve = Reserve(sender.ask("carried"))
    worker = Worker(layers, seed=2)
    reserve.take(0)
    offered = sender.ask("stage", parts)
    own, other = cpu_s(), sender.ask("cpu")
    fetching = partial(fetch, offered["places"], "bench", KEY, cancelled=lambda: False, limit_s=LIMIT_S)
    transfer_s, found = timed(partial(fetching, modules=worker.modules, reserve=reserve))
    used = {"receiver_cpu_s": cpu_s() - own, "sender_cpu_s": sender.ask("cpu") - other}
    load_s, _ = timed(lambda: load(found.header, found.tensors, worker.modules, worker.registered))
    sender.ask("release")
    times = {name: offered[name] for name in ("state_s", "stage_s")}
    times |= {"transfer_s": transfer_s, "load_s": load_s}
    return {"bytes": offered["bytes"], "reserved": reserved, **times, **used}


def receive_torchft(sender: Sender, layers: int) -> dict[str, float]:
    from torchft.checkpointing.http_transport import HTTPTransport

    transport: Any = HTTPTransport(timeout=timedelta(seconds=LIMIT_S), num_chunks=0)
    worker = Worker(layers, seed=2)
    offered = sender.ask("offer")
    own, other = cpu_s(), sender.ask("cpu")
    limit = timedelta(seconds=LIMIT_S)
    transfer_s, found = timed(lambda: transport.recv_checkpoint(0, offered["metadata"], 1, limit))
    used = {"receiver_cpu_s": cpu_s() - own, "sender_cpu_s": sender.ask("cpu") - other}
    load_s, _ = timed(lambda: worker.load_state_dict(found))
    sender.ask("release")
    size = sum(
        each.numel() * each.element_size()
        for each in [*found["model"].values(), *(t for s in found["optimizer"]["state"].values() for t in s.values())]
    )
    return {"bytes": size, "transfer_s": transfer_s, "load_s": load_s, "stage_s": offered["stage_s"], **used}


def in_new_process(call: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run ``call`` in a fork of this process, as a worker that joins is one: its memory is fresh, torch is imported."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def receive() -> None:
        theirs.send(call(*arguments))

    process = context.Process(target=receive)
    process.start()
    theirs.close()
    try:
        found: dict[str, float] = ours.recv()
        process.join(10)
        return found
    finally:
        process.kill()
        process.join()


def hash_speeds(frame_bytes: int = 1 << 20, total_bytes: int = 1 << 28) -> dict[str, float]:
    """GB/s of one thread: the hash that CRAFT uses, and a checksum that authenticates nothing."""
    data = memoryview(bytearray(frame_bytes))
    kinds: dict[str, Callable[[], object]] = {
        "keyed BLAKE3": lambda: blake3(data, key=KEY).digest(),
        "CRC-32": lambda: zlib.crc32(data),
    }
    speeds = {}
    for name, call in kinds.items():
        rounds = [timed(lambda call=call: [call() for _ in range(total_bytes // frame_bytes)])[0] for _ in range(5)]  # type: ignore[misc]
        speeds[name] = total_bytes / sorted(rounds)[2] / 1e9
    return speeds


def run(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    import torchft.checkpointing.http_transport  # noqa: F401  (so that no receiver has to)

    sender = Sender(args.layers)
    systems: dict[str, Callable[[int], dict[str, float]]] = {
        "craft": lambda turn: receive_craft(sender, args.layers, 1, turn % 2 == 1),
        "torchft": lambda turn: receive_torchft(sender, args.layers),
        "craft, 2 stripes": lambda turn: receive_craft(sender, args.layers, 2, turn % 2 == 1),
    }
    transfers: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    try:
        for turn in range(-WARM_UP, args.rounds):
            # Each is the first in its turn: memory that one gives back is there for the next, and not for nothing.
            order = [*systems][turn % len(systems) :] + [*systems][: turn % len(systems)]
            for name in order:
                found = in_new_process(systems[name], turn)
                speed = found["bytes"] / found["transfer_s"] / 1e9
                print(f"{'warm-up' if turn < 0 else turn}, {name}: {speed:.2f} GB/s", flush=True)
                if turn >= 0:
                    transfers[name].append(found)
    finally:
        sender.end()
    return transfers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="transfers of each system")
    parser.add_argument("--layers", type=int, default=12, help="of the transformer; 12 make 1 GB")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> int:
    args = parse()
    exit_on_sigterm()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "transfer", "environment": environment(), "failed": []}
    result["hash_gb_s"] = hash_speeds()
    result["transfers"] = run(args)
    result["settings"] = {"rounds": args.rounds, "layers": args.layers}
    return finish(result, args.out)


if __name__ == "__main__":
    sys.exit(main())
