"""Find the TCP connections of a Gloo group among the file descriptors of this process.

Gloo has no abort. What frees a blocked call is ``shutdown`` on the group's own connections, and only those: a listening
socket would make Gloo end the process, and the rendezvous store's sockets belong to others. A connection is known as
Gloo's by its ports: either ours is the port of the group's own listening socket, or the peer's is that of a member's.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator


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
    """Return duplicates of the connections that were accepted on ``own_port`` or lead to one of ``peer_addresses``."""
    found = []
    for copy in _sockets():
        try:
            listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ours = not listening and (
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
