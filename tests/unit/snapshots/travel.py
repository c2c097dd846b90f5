"""Things that the tests of this folder share: moving a state, and what a user might register."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch

from craft.snapshots.donor import Donor
from craft.snapshots.fetch import Fetched, fetch
from craft.snapshots.portable import State

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
