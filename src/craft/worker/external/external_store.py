"""The ``TCPStore`` at which another framework's groups rendezvous, and the variables that torchrun would set for it.

Every guest that asks for one (``craft.attend(meets=True)``) hosts a store; the one of rank 0 is used.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed

from craft.protocol.membership import Generation

# The names that torch does not export by type.
dist: Any = torch.distributed


class ExternalStore:
    """This worker's store. It lives as long as the process: torch's groups use it again."""

    def __init__(self, address: str) -> None:
        family, _, _, _, resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        # torch would listen on every address of the host.
        listening = socket.create_server(resolved[:2], family=family, backlog=1024)
        self.port = int(listening.getsockname()[1])
        self._store = dist.TCPStore(
            address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


def variables(generation: Generation, worker_id: str) -> Mapping[str, str]:
    """Return torchrun's environment variables for this worker in ``generation``."""
    rank = generation.rank_of(worker_id)
    assert rank is not None
    hosts = list(dict.fromkeys(member.host for member in generation.members))
    here = [member for member in generation.members if member.host == generation.members[rank].host]
    leader = generation.members[0]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(generation.members)),
        "LOCAL_RANK": str([member.worker_id for member in here].index(worker_id)),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(hosts.index(here[0].host)),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": leader.address,
        "MASTER_PORT": str(leader.store_port),
        # No process may host another store there: rank 0 already does.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": generation.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
