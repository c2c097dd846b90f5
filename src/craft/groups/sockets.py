"""Find the TCP connections of a Gloo group among the file descriptors of this process.

Gloo has no abort. ``shutdown`` on the group's connections frees a blocked call. It must hit only those: on a listening socket
it would make Gloo end the process, and the rendezvous store's sockets serve others. A connection is Gloo's if its local port
is that of the group's listening socket, or its remote port is that of a member's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path

_LOOP = "gloo_tcp_loop"
"""Name of Gloo's thread that waits for a group's connections."""
_OPEN_HERE = (1, 8)
"""Linux's numbers of the TCP states established and close-wait."""
_RETRY_S = 0.001
_ATTEMPTS = 200


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process: other threads cannot close it while it is inspected."""
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
    """Return the numeric address and port of every socket on which this process listens."""
    found = set()
    for copy in _sockets():
        with copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_numeric(copy.getsockname()))
    return found


def connections(own_port: int, peer_addresses: Collection[tuple[str, int]]) -> list[socket.socket]:
    """Return duplicates of the connections that were accepted on ``own_port`` or lead to one of ``peer_addresses``.

    Connections that were shut down are left out: Gloo may hold them for long, and their ports may be reused meanwhile.
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
    """Return address and port of a socket's name; an IPv4 address mapped to IPv6 as IPv4."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def gloo_connections() -> list[socket.socket]:
    """Return duplicates of the connections of every Gloo group in this process, open or opening.

    It needs no knowledge of how they were opened and finds no other connection: each group has a Gloo thread that waits on an
    epoll instance, which holds the group's connections, a pipe and its listening socket. The kernel says which instance a
    thread waits on and what it contains. For workers attached from torchrun, which have no group of CRAFT.
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
    """Free every call that is blocked in a Gloo group, here and at the peers; return the number of connections."""
    found = gloo_connections()
    cut(found)
    return len(found)


def _gloo_instances() -> set[int]:
    """Return the descriptors of the epoll instances that Gloo's threads wait on."""
    found = set()
    pending = [task for task in Path("/proc/self/task").iterdir() if _read(task / "comm").strip() == _LOOP]
    for attempt in range(_ATTEMPTS):
        if attempt:
            # A thread that is running waits again within moments.
            time.sleep(_RETRY_S)
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
    """Return the epoll instance that a thread waits on; None if it waits on none."""
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
    """Yield descriptor and inode of everything in an epoll instance; the inode detects a reused descriptor."""
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
    """Shut one connection down; the caller still closes it."""
    # No longer connected: the peer was faster.
    with contextlib.suppress(OSError):
        copy.shutdown(socket.SHUT_RDWR)
