"""What an agent reaches beyond its own event loop, as one value: the supervisor hands each part to the one that needs it.

The deterministic simulation (``tests/simulation``) gives its own.
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
    """The defaults are those of a real process."""

    client: Callable[..., Client] = Client
    """Asks the lighthouse one thing, on a connection for that alone."""
    session: Callable[..., Any] = aiohttp.ClientSession
    """Opens the lasting connection to the lighthouse."""
    process_files: Callable[[int], ProcessFiles] = ProcessFiles
    """The kernel's view of a worker."""
    activity: Callable[[Path], ActivityReader] = ActivityReader
    """What a worker says that it is doing."""
    scratch: Callable[[], Scratch] = Scratch
    """The agent's folder for its socket."""
    unreachable: Callable[[Generation, str], tuple[str, ...]] = unreachable
    """The members to which the network carries nothing; called in a thread."""
