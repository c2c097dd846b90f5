"""Things that the tests of this folder share: moving a state, and what a user might register."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from craft.protocol.errors import CraftError
from craft.snapshots.state.raw_memory import same_bits
from craft.snapshots.state.serialized import State
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import Fetched, fetch, recall

KEY = bytes(range(32))
HERE = "127.0.0.1"
LIMIT_S = 30.0
"""Longer than anything here may take: what takes longer hangs."""
AT_ONCE_S = 2.0
"""What is to happen in milliseconds, on a machine that is busy with other things."""


def never() -> bool:
    return False


class Registered:
    """Whatever a user registers: all that counts is what its state_dict gives."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any, /) -> None:
        self.state = state


def moved(state: State, modules: Mapping[str, torch.nn.Module] | None = None, of: int = 1) -> Fetched:
    """Carry a state through ``of`` donors."""
    donors = [Donor(HERE, KEY) for _ in range(of)]
    try:
        for part, donor in enumerate(donors):
            donor.stage("2-beef", 7, state, part, of)
        places = [(HERE, donor.port) for donor in donors]
        return fetch(places, "2-beef", KEY, cancelled=never, limit_s=LIMIT_S, modules=modules)
    finally:
        for donor in donors:
            donor.close()


class Relay:
    """A hop between a donor and who fetches: passes on what the donor says, until ``pause_after``, and may damage a byte."""

    def __init__(self, port: int, *, pause_after: int | None = None, damage: int | None = None) -> None:
        self._port = port
        self._pause_after = pause_after
        self._damage = damage
        self.paused = threading.Event()
        self.resume = threading.Event()
        self._server = socket.create_server((HERE, 0))
        self.place = (HERE, int(self._server.getsockname()[1]))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._server.accept()
        with client, socket.create_connection((HERE, self._port)) as donor:
            asking = threading.Thread(target=_pass_on, args=(client, donor), daemon=True)
            asking.start()
            self._tell(donor, client)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            asking.join()

    def _tell(self, donor: socket.socket, client: socket.socket) -> None:
        passed = 0
        while data := bytearray(_receive(donor)):
            if self._damage is not None and passed <= self._damage < passed + len(data):
                data[self._damage - passed] ^= 1
            passed += len(data)
            try:
                client.sendall(data)
            except OSError:
                return
            if self._pause_after is not None and passed >= self._pause_after:
                self.paused.set()
                assert self.resume.wait(LIMIT_S)

    def close(self) -> None:
        self.resume.set()
        self._thread.join(LIMIT_S)
        self._server.close()


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := _receive(source):
            target.sendall(data)


def state_of(*tensors: torch.Tensor, **plain: Any) -> State:
    return State({}, {"item": Registered({"tensors": list(tensors), **plain})}, b"")


def random_state(megabytes: int = 3) -> State:
    """Tensors that end in the middle of frames, small ones between them."""
    sizes = [(megabytes << 18) - 777, 1, 0, 3, 250_001]
    return state_of(*[torch.rand(size, generator=torch.Generator().manual_seed(size)) for size in sizes])


def get(
    *donors: Donor | tuple[str, int], name: str = "g", key: bytes = KEY, limit_s: float = LIMIT_S, lanes: int = 1
) -> Fetched:
    places = [each if isinstance(each, tuple) else (HERE, each.port) for each in donors]
    return fetch(places, name, key, cancelled=never, limit_s=limit_s, lanes=lanes)


def remembered(donor: Donor, name: str, key: bytes = KEY, limit_s: float = LIMIT_S) -> bytes:
    return recall((HERE, donor.port), name, key, never, limit_s)


def same(fetched: Fetched, state: State) -> bool:
    pairs = zip(fetched.tensors, state.tensors, strict=True)
    return fetched.header == state.header and all(same_bits(mine, theirs) for mine, theirs in pairs)


class Background(threading.Thread):
    """A call on a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.error: CraftError | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except CraftError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def outcome(self, limit_s: float = LIMIT_S) -> Any:
        self.join(limit_s)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result


def wait_until(there: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < deadline, "it did not come"
