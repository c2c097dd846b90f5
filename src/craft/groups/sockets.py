"""Find the TCP connections of a Gloo group among the file descriptors of this process.

Gloo has no abort. What frees a blocked call is ``shutdown`` on the group's own connections, and only those: a listening
socket would make Gloo end the process, and the rendezvous store's sockets belong to others. A connection is known as
Gloo's by its ports: either ours is the port of the group's own listening socket, or the peer's is that of a member's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path

_LOOP = "gloo_tcp_loop"
"""The name that Gloo gives to the thread that waits for a group's connections."""
_OPEN_HERE = (1, 8)
"""Of TCP's states, as Linux numbers them: established, and closed by the peer alone."""
_LOOK_AGAIN_S = 0.001
_LOOKS = 200


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process. What is looked at is what is held: no race with other threads."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            yield copy
        else:
            copy.close()


def listening_addresses() -> set[tuple[str, int]]:
    """Where this process listens: numeric address and port."""
    found = set()
    for copy in _sockets():
        with copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_numeric(copy.getsockname()))
    return found


def connections(own_port: int, peer_addresses: Collection[tuple[str, int]]) -> list[socket.socket]:
    """Return duplicates of the connections that were accepted on ``own_port`` or lead to one of ``peer_addresses``.

    Not of those that were cut: Gloo may hold them for long, and their ports are given to others meanwhile.
    """
    found = []
    for copy in _sockets():
        try:
            state = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            ours = state in _OPEN_HERE and (
                copy.getsockname()[1] == own_port or _numeric(copy.getpeername()) in peer_addresses
            )
        except OSError:
            ours = False
        if ours:
            found.append(copy)
        else:
            copy.close()
    return found


def _numeric(name: tuple[str, int]) -> tuple[str, int]:
    """Address and port of a socket's name; an IPv4 address is the same however the socket speaks of it."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def gloo_connections() -> list[socket.socket]:
    """Return duplicates of the connections of every Gloo group in this process, whoever opened it, or is opening it now.

    Nothing has to be known about how they were opened, and no other connection can be among them: each group has a thread of
    Gloo's that waits on an epoll instance of its own, in which its connections are, beside a pipe and the socket on which it
    listens. The kernel tells which instance a thread waits on, and what is in it. A group of CRAFT's own is one of them, too:
    this is for guests, which have none.
    """
    found = []
    for instance in _gloo_instances():
        for fd, inode in _watched(instance):
            with contextlib.suppress(OSError):
                copy = os.dup(fd)
                if os.fstat(copy).st_ino != inode or not os.readlink(f"/proc/self/fd/{copy}").startswith("socket:"):
                    os.close(copy)
                    continue
                connection = socket.socket(fileno=copy)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.close()
                else:
                    found.append(connection)
    return found


def abort_gloo() -> int:
    """Free everybody who is blocked in any Gloo group of this process, here and at the peers.

    Returns how many connections that took.
    """
    found = gloo_connections()
    cut(found)
    return len(found)


def _gloo_instances() -> set[int]:
    """The epoll instances, by descriptor, that threads of Gloo's wait on."""
    found = set()
    pending = [task for task in Path("/proc/self/task").iterdir() if _read(task / "comm").strip() == _LOOP]
    for look in range(_LOOKS):
        if look:
            # A thread that runs just now will wait again within moments.
            time.sleep(_LOOK_AGAIN_S)
        for task in list(pending):
            instance = _waits_on(task)
            if instance is not None or not task.exists():
                pending.remove(task)
            if instance is not None:
                found.add(instance)
        if not pending:
            break
    return found


def _waits_on(task: Path) -> int | None:
    """The epoll instance in whose wait a thread is; None if it is not in one."""
    # The number of the system call, then its arguments, in hexadecimal.
    _, _, arguments = _read(task / "syscall").partition(" ")
    first = arguments.partition(" ")[0]
    if not first.startswith("0x"):
        return None
    fd = int(first, 16)
    try:
        return fd if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]" else None
    except OSError:
        return None


def _watched(instance: int) -> Iterator[tuple[int, int]]:
    """Descriptor and inode of everything in an epoll instance; by both, a descriptor that is used again is told apart."""
    for line in _read(Path(f"/proc/self/fdinfo/{instance}")).splitlines():
        if line.startswith("tfd:"):
            words = line.split()
            inode = next(word for word in words if word.startswith("ino:"))
            yield int(words[1]), int(inode.removeprefix("ino:"), 16)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        # The thread, or the descriptor, is gone.
        return ""


def cut(found: Collection[socket.socket]) -> None:
    """Shut the connections down, in both directions, for every process that shares them."""
    for copy in found:
        with copy:
            shut(copy)


def shut(copy: socket.socket) -> None:
    """Shut one connection down; it stays this process's to close."""
    # Not connected any more: the peer was faster.
    with contextlib.suppress(OSError):
        copy.shutdown(socket.SHUT_RDWR)
