"""All access of an agent to the world outside its event loop, as one value.

The supervisor passes each part to the object that needs it. The deterministic simulation (``tests/simulation``) replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from craft.agent.linux.procfs import ProcessFiles
from craft.agent.linux.scratch import Scratch
from craft.groups.reachability import unreachable
from craft.protocol.membership import Generation
from craft.wire.activity import ActivityReader
from craft.wire.client import Client


@dataclass(frozen=True)
class HostAccess:
    """Access to lighthouse, processes, files and network; the defaults are the real ones."""

    client: Callable[..., Client] = Client
    """Makes single requests to the lighthouse, each on a new connection."""
    session: Callable[..., Any] = aiohttp.ClientSession
    """Opens the permanent connection to the lighthouse."""
    process_files: Callable[[int], ProcessFiles] = ProcessFiles
    """The kernel's view of a worker."""
    activity: Callable[[Path], ActivityReader] = ActivityReader
    """Reads what a worker publishes about its activity."""
    scratch: Callable[[], Scratch] = Scratch
    """Makes the agent's folder for its socket."""
    unreachable: Callable[[Generation, str], tuple[str, ...]] = unreachable
    """Returns the members that the network does not reach; called in a thread."""
