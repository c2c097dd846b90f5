"""Find the members of a generation that this worker cannot reach."""

from __future__ import annotations

import socket
import threading

from craft.protocol.membership import Generation, Member

_LIMIT_S = 1.0
_ATTEMPTS = 2
"""A single packet may get lost."""


def unreachable(generation: Generation, worker_id: str, limit_s: float = _LIMIT_S) -> tuple[str, ...]:
    """Return the members to which ``worker_id`` cannot connect within the limit.

    A process that hangs counts as reached, since its kernel answers: this finds network failures only.
    """
    missing: set[str] = set()

    def try_connect(member: Member) -> None:
        for _ in range(_ATTEMPTS):
            try:
                socket.create_connection((member.address, member.store_port), limit_s).close()
            except ConnectionRefusedError:
                # Its process is gone but the network works: its agent will report it.
                return
            except OSError:
                continue
            return
        missing.add(member.worker_id)

    threads = [
        threading.Thread(target=try_connect, args=(member,), name="craft-reach", daemon=True)
        for member in generation.members
        if member.worker_id != worker_id
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(member.worker_id for member in generation.members if member.worker_id in missing)
