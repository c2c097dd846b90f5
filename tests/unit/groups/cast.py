"""Members of generations as real processes: a director tells each what to do, and signals do the rest.

Everything that opens a group runs in a child. An opening that hangs is left behind there, as it is in a worker, and goes with
the process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed

from craft.groups.gloo import GlooGroup
from craft.groups.nccl import NcclGroup
from craft.groups.rendezvous import RendezvousStore
from craft.protocol.errors import GroupBroken, GroupError
from craft.protocol.membership import Generation, Member
from craft.worker.membership.devices import connect_devices

KEY = bytes(range(32))
"""Of the job that all players are in."""
LIMIT_S = 30.0
"""Longer than anything here may take: what takes longer hangs."""
AT_ONCE_S = 2.0
"""What is to happen in milliseconds, on a machine that is busy with other things."""
DEVICE_OPENS_S = 10.0
"""The first group between devices of a process: NCCL takes 0.7 s for it, and more where many processes share a device."""

dist: Any = torch.distributed


class Outcome(msgspec.Struct, frozen=True):
    """What came of a call: a value, or an error of ours."""

    value: Any = None
    error: str = ""
    message: str = ""
    generation: int = -1
    peer: int = -1
    took_s: float = 0.0


class Player:
    """One member, in its own process. Its methods are what the director can ask for."""

    def __init__(self) -> None:
        self.store = RendezvousStore("127.0.0.1", KEY)
        self.groups: dict[int, GlooGroup | NcclGroup] = {}
        self._device: torch.device | None = None
        self._on_device: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._calls: dict[str, _Call] = {}
        self._foreign: socket.socket | None = None

    def store_port(self) -> int:
        return self.store.port

    def open(self, generation: Generation, rank: int, address: str, limit_s: float, directly: bool = True) -> int:
        gloo = GlooGroup(generation, rank, address, KEY, limit_s, directly=directly)
        if self._device is not None:
            self.groups[generation.number] = connect_devices(gloo, self._device)
        else:
            self.groups[generation.number] = gloo
        return gloo.size

    def use(self, device: str) -> None:
        """From now on groups carry tensors between devices."""
        # NCCL refuses two ranks on one device of one host.
        os.environ["NCCL_HOSTID"] = str(os.getpid())
        self._device = torch.device(device)

    def swap(self, number: int, value: float, numel: int, to: int) -> None:
        """Begin to exchange numbers on devices with one peer."""
        group = self.groups[number]
        assert isinstance(group, NcclGroup)
        with torch.cuda.stream(group.stream):
            own = torch.full((numel,), value, device="cuda")
            their = torch.zeros_like(own)
        group.swap([(own, to)], [(their, to)])
        self._on_device[number] = own, their

    def swapped(self, number: int) -> list[float]:
        """What came of it: the first number and the last."""
        group = self.groups[number]
        assert isinstance(group, NcclGroup)
        group.wait_device(group.mark())
        their = self._on_device[number][1]
        return [float(their[0]), float(their[-1])]

    def device_is_free(self, number: int, limit_s: float) -> bool:
        """Whether the stream of a group comes to its end, and the device computes."""
        group = self.groups[number]
        assert isinstance(group, NcclGroup)
        mark, deadline = group.mark(), time.monotonic() + limit_s
        while not mark.query():
            if time.monotonic() > deadline:
                return False
        return float(torch.ones(3, device="cuda").sum()) == 3.0

    def send(self, number: int, values: Sequence[float], peer: int, tag: int) -> None:
        self.groups[number].send(torch.tensor(values), peer, tag).wait()

    def recv(self, number: int, size: int, peer: int, tag: int) -> list[float]:
        target = torch.full((size,), -1.0)
        self.groups[number].recv(target, peer, tag).wait()
        return list(target.tolist())

    def recv_in_reverse(self, number: int, tags: Sequence[int], peer: int) -> list[float]:
        """Receive one number for each tag, waiting for the last one first, and for each of them twice."""
        targets = [torch.zeros(1) for _ in tags]
        pending = [self.groups[number].recv(target, peer, tag) for target, tag in zip(targets, tags, strict=True)]
        for each in [*reversed(pending), *pending]:
            each.wait()
        return [target.item() for target in targets]

    def post(self, number: int, num_bytes: int, peer: int) -> None:
        """Begin to receive; ``finish`` waits for it."""
        self._target = torch.zeros(num_bytes, dtype=torch.uint8)
        self._posted = self.groups[number].recv(self._target, peer, 0)

    def finish(self) -> None:
        self._posted.wait()

    def send_much(self, number: int, num_bytes: int, peer: int) -> None:
        self.groups[number].send(torch.zeros(num_bytes, dtype=torch.uint8), peer, 0).wait()

    def all_reduce(self, number: int, values: Sequence[float], dtype: str = "float32") -> list[float]:
        tensor = torch.tensor(values, dtype=getattr(torch, dtype))
        self.groups[number].all_reduce(tensor).wait()
        return list(tensor.tolist())

    def abort(self, number: int, num_threads: int = 1) -> None:
        """Abort, from several threads at once, each of them twice."""

        def twice() -> None:
            self.groups[number].abort()
            self.groups[number].abort()

        threads = [threading.Thread(target=twice) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)

    def call(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a test's own with a group."""
        return function(self.groups[number], *arguments)

    def close(self, number: int) -> None:
        self.groups[number].close()

    def begin(self, name: str, call: str, *arguments: Any) -> None:
        """Start a call on a thread of its own, which may be left behind."""
        self._calls[name] = _Call(getattr(self, call), arguments)

    def end(self, name: str, limit_s: float = LIMIT_S) -> Outcome:
        """What came of a call that was begun."""
        return self._calls[name].outcome(limit_s)

    def running(self, name: str) -> bool:
        return self._calls[name].is_alive()

    def connect(self, address: tuple[str, int]) -> None:
        """Connect to somewhere that is no business of CRAFT's."""
        self._foreign = socket.create_connection(address, timeout=LIMIT_S)

    def echo(self, data: bytes) -> bytes:
        assert self._foreign is not None
        self._foreign.sendall(data)
        return self._foreign.recv(len(data), socket.MSG_WAITALL)

    def open_default_group(self, path: str, rank: int, size: int) -> None:
        """The script's own use of torch.distributed."""
        dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)

    def default_all_reduce(self, value: float) -> float:
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return tensor.item()

    def await_member(self, name: str, rank: int) -> None:
        """Wait until a member has come to the store that this one hosts."""
        deadline = time.monotonic() + LIMIT_S
        while name not in self.store._gatherings or rank not in self.store._gatherings[name].brought:
            assert time.monotonic() < deadline, "it does not come"
            os.sched_yield()


class _Call(threading.Thread):
    def __init__(self, call: Callable[..., Any], arguments: Sequence[Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._arguments = arguments
        self._outcome = Outcome()
        self._begun = threading.Event()
        self.start()
        self._begun.wait(LIMIT_S)

    def run(self) -> None:
        started = time.monotonic()
        self._begun.set()
        self._outcome = attempt(self._call, self._arguments, started)

    def outcome(self, limit_s: float) -> Outcome:
        self.join(limit_s)
        return self._outcome if not self.is_alive() else Outcome(error="still blocked")


def attempt(call: Callable[..., Any], arguments: Sequence[Any], started: float) -> Outcome:
    try:
        return Outcome(value=call(*arguments), took_s=time.monotonic() - started)
    except GroupError as error:
        return Outcome(
            error=type(error).__name__,
            message=str(error),
            generation=error.generation,
            peer=error.peer if isinstance(error, GroupBroken) else -1,
            took_s=time.monotonic() - started,
        )


def play(pipe: Connection) -> None:
    """The child: do what one is told, until the director has left."""
    player = Player()
    try:
        while True:
            call, arguments = pipe.recv()
            if call == "end":
                pipe.send(player.end(*arguments))
            else:
                pipe.send(attempt(getattr(player, call), arguments, time.monotonic()))
    except EOFError:
        pass
    finally:
        # Threads that hang in Gloo would make an orderly end crash.
        os._exit(0)


class Actor:
    """The director's hold on one player."""

    def __init__(self, context: Any, device: str | None) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=play, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.store_port = self.ask("store_port").value
        if device is not None:
            self.ask("use", device)

    def tell(self, call: str, *arguments: Any) -> None:
        self._pipe.send((call, arguments))

    def answer(self) -> Outcome:
        assert self._pipe.poll(LIMIT_S), "no answer within the limit"
        outcome = self._pipe.recv()
        assert isinstance(outcome, Outcome)
        return outcome

    def ask(self, call: str, *arguments: Any) -> Outcome:
        self.tell(call, *arguments)
        return self.answer()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.join(LIMIT_S)

    def stop(self) -> None:
        """Stop it in its tracks; returns once it stands still."""
        self._signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        deadline = time.monotonic() + LIMIT_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, "it does not stop"

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()
        self._process.close()


class Cast:
    """All players of one test; with a ``device``, their groups carry tensors between devices, too."""

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self.opens_s = AT_ONCE_S if device is None else DEVICE_OPENS_S
        """Within this a group is open."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["craft.groups.gloo"])
        self._actors: list[Actor] = []

    def actors(self, count: int) -> list[Actor]:
        new = [Actor(self._context, self._device) for _ in range(count)]
        self._actors += new
        return new

    def end(self) -> None:
        for actor in self._actors:
            actor.end()


def generation_of(number: int, actors: Sequence[Actor], extra: int = 0) -> Generation:
    """A generation of these actors, and of ``extra`` members of whom nothing is heard."""
    members = [
        Member(worker_id=f"w{rank}", address="127.0.0.1", store_port=actor.store_port)
        for rank, actor in enumerate(actors)
    ]
    members += [Member(worker_id=f"x{index}") for index in range(extra)]
    return Generation(number=number, nonce="test", members=tuple(members))


def open_group(number: int, actors: Sequence[Actor], address: str = "127.0.0.1") -> list[Outcome]:
    """Let all of them meet; returns what came of it."""
    generation = generation_of(number, actors)
    for rank, actor in enumerate(actors):
        actor.tell("open", generation, rank, address, LIMIT_S)
    return [actor.answer() for actor in actors]
