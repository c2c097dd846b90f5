"""Ask the lighthouse for the position of a host's first worker, where the host holds parts of replicas."""

from __future__ import annotations

import asyncio

from msgspec import UNSET

from craft.agent.host.relay import Relay
from craft.protocol.messages import Directive, HostPart
from craft.settings.run import RunSettings


class FirstPosition:
    """Known at once on a host of whole replicas; else once a directive has it. Lives on the agent's event loop."""

    def __init__(self, settings: RunSettings, relay: Relay) -> None:
        self._host = settings.host
        self._workers = settings.workers
        self._relay = relay
        self.known = asyncio.Event()
        self.value = 0
        if settings.workers % settings.workers_per_replica == 0:
            self.known.set()
        else:
            relay.say(part=HostPart(workers=self._workers))

    def directed(self, directive: Directive) -> None:
        """Take the position from a directive, and report it from now on: a restarted lighthouse hears it that way."""
        if self.known.is_set() or directive.first_positions is UNSET:
            return
        found = directive.first_positions.get(self._host)
        if found is not None:
            self.value = found
            self._relay.say(part=HostPart(workers=self._workers, first_position=found))
            self.known.set()
