"""The network of the tests of several hosts: hosts reach each other, and faults between them are as silent as they should be."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from .jobs import wait_for
from .network import Network, find_obstacle, remove_leftovers

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


@pytest.fixture
def network(namespaces: None) -> Iterator[Network]:
    network = Network(("a", "b", "c"))
    yield network
    network.close()


def on_host(network: Network, name: str, make: Callable[[], T]) -> T:
    """Call ``make`` on a host; sockets that it makes stay there."""
    found: list[T] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        space = next(part.partition("=")[2] for part in network.inside(name) if part.startswith("--net="))
        with Path(space).open("rb") as file:
            # Of this thread alone.
            assert libc.setns(file.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        found.append(make())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


class Call:
    """A TCP connection between two hosts."""

    def __init__(self, network: Network, one: str, other: str) -> None:
        server = on_host(network, other, lambda: socket.create_server((network.address(other), 0)))
        place = server.getsockname()
        self.caller = on_host(network, one, lambda: socket.create_connection(place, timeout=5))
        self.called, _ = server.accept()
        server.close()
        self.caller.settimeout(10)
        self.called.settimeout(10)

    def hears(self, limit_s: float) -> bool:
        """Whether anything reaches the called one within the limit: data, the end, an error."""
        poller = select.poll()
        poller.register(self.called, select.POLLIN)
        return bool(poller.poll(limit_s * 1000))

    def close(self) -> None:
        self.caller.close()
        self.called.close()


@pytest.fixture
def call(network: Network) -> Iterator[Callable[[str, str], Call]]:
    made: list[Call] = []

    def make(one: str, other: str) -> Call:
        made.append(Call(network, one, other))
        return made[-1]

    yield make
    for each in made:
        each.close()


Caller = Callable[[str, str], Call]


def test_hosts_reach_each_other_and_nothing_else(network: Network, call: Caller) -> None:
    pair = call("a", "b")
    assert pair.called.getpeername()[0] == network.address("a")
    assert pair.caller.getpeername()[0] == network.address("b")
    outward = on_host(network, "a", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with outward, pytest.raises(OSError, match="unreachable"):
        outward.connect(("192.0.2.1", 9))


@pytest.mark.parametrize("how", ["cut", "cut_off"])
def test_a_cut_is_silent_and_what_was_sent_into_it_arrives_after_it_heals(
    network: Network, call: Caller, how: str
) -> None:
    cut, uncut = call("a", "b"), call("a" if how == "cut" else "c", "c" if how == "cut" else "b")
    if how == "cut":
        network.cut("a", "b")
    else:
        network.cut_off("a")
    cut.caller.sendall(b"x")
    uncut.caller.sendall(b"y")
    assert uncut.called.recv(1) == b"y"
    assert not cut.hears(0.3), "something came through, or an end was seen"
    # Nor does the one who sends hear of it.
    assert cut.caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    network.heal()
    assert cut.called.recv(1) == b"x"


def test_a_mute_host_hears_the_others_and_is_not_heard(network: Network, call: Caller) -> None:
    to, of = call("b", "a"), call("a", "b")
    network.mute("a")
    to.caller.sendall(b"x")
    of.caller.sendall(b"y")
    assert to.called.recv(1) == b"x"
    assert not of.hears(0.3)
    network.heal()
    assert of.called.recv(1) == b"y"


def test_who_calls_into_a_cut_waits_instead_of_being_refused(network: Network) -> None:
    network.cut_off("b")

    def knock() -> socket.socket:
        knocking = socket.socket()
        knocking.settimeout(0.5)
        with pytest.raises(TimeoutError):
            knocking.connect((network.address("b"), 9))
        return knocking

    on_host(network, "a", knock).close()


def test_a_lossy_host_loses_about_the_share_that_was_asked_for(network: Network) -> None:
    network.lose("b", 10)
    inbox = on_host(network, "b", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sender = on_host(network, "a", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with inbox, sender:
        inbox.bind((network.address("b"), 0))
        came = 0
        for _ in range(10):
            for _ in range(100):
                sender.sendto(b"x", inbox.getsockname())
            came += sum(1 for _ in iter(lambda: arrived(inbox), False))
    assert 840 <= came <= 950


def arrived(inbox: socket.socket) -> bool:
    """Take one datagram out; False if none is there, or comes soon."""
    poller = select.poll()
    poller.register(inbox, select.POLLIN)
    return bool(poller.poll(100)) and bool(inbox.recv(1))


def test_a_slow_host_sends_and_receives_no_faster_than_it_may(network: Network, call: Caller) -> None:
    network.slow("b", megabits=8)
    slow = [transfer_s(call(one, other), 500_000) for one, other in (("a", "b"), ("b", "a"))]
    assert min(slow) > 0.4 and max(slow) < 3
    network.heal()
    # By itself a hundredth of it; the machine may be busy.
    assert min(transfer_s(call("a", "b"), 500_000) for _ in range(5)) < min(slow) / 2


def transfer_s(pair: Call, size: int) -> float:
    """How long it takes to send so many bytes."""
    began = time.monotonic()
    sending = threading.Thread(target=pair.caller.sendall, args=(bytes(size),))
    sending.start()
    while size:
        size -= len(pair.called.recv(size))
    sending.join()
    return time.monotonic() - began


ABANDON = """
import os, signal, subprocess
from tests.integration.network import Network
network = Network(("a",))
left = subprocess.Popen([*network.inside("a"), "sh", "-c", "echo inside; exec sleep 600"], stdout=subprocess.PIPE)
left.stdout.readline()
print(left.pid, network.inside("a")[1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_session_left_behind_is_removed_at_the_next_start(namespaces: None, network: Network) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", ABANDON], cwd=root, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pid, place = done.stdout.split()
    space = Path(place.partition("=")[2])
    assert space.exists()
    remove_leftovers()
    assert not space.exists()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(int(pid)), "its process ends", 5)
    # Those of a living session stay.
    assert Path(network.inside("a")[1].partition("=")[2]).exists()


def test_a_machine_without_the_commands_says_so(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_obstacle() == "tests of several hosts need ip, tc, nft, nsenter: run 'make packages'"


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
