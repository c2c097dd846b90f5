"""A simulated fork server: speaks the real messages with the real ``ForkServerProcess``, and starts simulated workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from craft.agent.linux.forkserver import Ended, Fork, Forked, Ready

from .clock import EPOCH, Process
from .streams import Far
from .workers import Worker

if TYPE_CHECKING:
    from .world import World

_IMPORT_S = 0.3


class ForkServer:
    """One child process of an agent; its workers are its own children and end with it."""

    def __init__(self, world: World, words: Sequence[str], parent: Process) -> None:
        self._world = world
        self.process = Process(world.machine, f"forks-{parent.host}", parent.host, parent)
        self._channel: Far | None = None
        self._received = b""
        self.process.on_exit.append(self._hang_up)

    def begin(self, say: Callable[[bytes], None]) -> None:
        self.process.later(_IMPORT_S, self._send, Ready())

    def attach(self, channel: Far) -> None:
        self._channel = channel

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._channel is not None and self.process.state != "dead":
            self._channel.send(msgspec.json.encode(message) + b"\n")

    def hear(self, data: bytes) -> None:
        if not data:
            self.process.kill(signal.SIGKILL)
            return
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self.process.soon(self._fork, msgspec.json.decode(line, type=Fork))

    def _fork(self, wanted: Fork) -> None:
        process = Process(self._world.machine, wanted.worker_id, self.process.host, self.process)
        worker = Worker(self._world, process, wanted.environment)
        self._world.workers[wanted.worker_id] = worker
        process.on_exit.append(lambda: self.process.soon(self._ended, worker))
        self._send(Forked(worker_id=wanted.worker_id, pid=process.pid))
        process.soon(worker.begin)

    def _ended(self, worker: Worker) -> None:
        code = worker.process.code or 0
        self._send(
            Ended(
                worker_id=worker.worker_id,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                time=EPOCH + self._world.machine.now,
            )
        )
