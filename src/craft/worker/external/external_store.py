"""Where groups that are not CRAFT's meet: a store of torch's in every guest that wants one, of which that of rank 0 is used.

Scripts and frameworks find it, and who they are, in the variables that torchrun sets. Enters: the first generation that this
worker is in. Leaves: its variables. ``craft.attend(meets=True)`` uses it.
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
    """This worker's store. It lives as long as the process: torch's groups come back to it."""

    def __init__(self, address: str) -> None:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        # Made here, since torch would listen on every address of the host.
        listening = socket.create_server(place[:2], family=family, backlog=1024)
        self.port = int(listening.getsockname()[1])
        self._store = dist.TCPStore(
            address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


def variables(generation: Generation, worker_id: str) -> Mapping[str, str]:
    """What the environment of this worker says while it is in ``generation``."""
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
        # Nobody else is to host a store there: rank 0 has it already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": generation.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
