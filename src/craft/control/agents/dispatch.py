"""Messages out: send the complete directive to every agent at once.

``Dispatch`` holds the current directive. A task per connection sends the latest one: an agent that does not read delays
no other, and gets one directive, not a queue of old ones, when it reads again. A large directive is sent in full once per
connection, compressed; then as an update of the one before. Each is encoded once for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from craft.decide.job.last_copy import holders
from craft.decide.job.state import JobState
from craft.protocol.heartbeats import Pace
from craft.protocol.messages import Directive
from craft.wire.codec import PACKED_FROM_BYTES, encode, pack
from craft.wire.deltas import difference

Send = Callable[[str | bytes], Awaitable[None]]


def directive_of(state: JobState, sequence: int) -> Directive:
    """Return the directive for ``state``."""
    stop = state.stopping
    return Directive(
        sequence=sequence,
        slots=state.slots,
        first_positions=_first_positions(state),
        generation=state.generation,
        upcoming=state.upcoming,
        # Every lost worker must end: one that still runs somewhere has no other way to know.
        fenced=tuple(view.member.worker_id for view in state.having("lost") if not view.ended),
        released=tuple(view.member.worker_id for view in state.having("left") if view.entered == 0),
        spare_positions=dict(state.moving) if state.moving else UNSET,
        holders=tuple(sorted(holders(state))),
        probe=state.probing,
        winding_down=state.winding_down,
        preempting=state.preempting,
        saved=state.saved if state.preempting is not None else None,
        wishes=state.wishes,
        restoration=state.restoration,
        replacing=state.replacing,
        injections=state.injections,
        loop=state.loop,
        finishing=state.finishing,
        stopping=stop is not None,
        exit_code=stop.exit_code if stop is not None else 0,
        reason=stop.reason if stop is not None else "",
        traceback=stop.traceback if stop is not None else None,
    )


def _first_positions(state: JobState) -> dict[str, int] | UnsetType:
    found = {host: part.first_position for host, part in state.parts if part.first_position is not None}
    return found or UNSET


class Dispatch:
    """The current directive and heartbeat interval, and the connections that get them."""

    def __init__(self, first_sequence: int) -> None:
        """``first_sequence`` must be above any that an earlier lighthouse of this job used."""
        self.directive = Directive(sequence=first_sequence)
        self._told = False
        self.pace = Pace()
        self._encoded: dict[int | None, str | bytes] = {}
        """The encoded directive for connections that last got this sequence; None: for new connections."""
        self._changed: dict[asyncio.Event, None] = {}
        """In the order of their connection."""

    def tell(self, state: JobState) -> None:
        """Make the directive for ``state`` the current one; an unchanged one is not sent."""
        wanted = directive_of(state, self.directive.sequence)
        if self._told and wanted == self.directive:
            return
        self.directive = replace(wanted, sequence=wanted.sequence + 1)
        self._told = True
        self._encoded.clear()
        self._wake()

    def set_pace(self, pace: Pace) -> None:
        """Set the heartbeat interval of every agent."""
        if pace != self.pace:
            self.pace = pace
            self._wake()

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()

    async def serve(self, send: Send) -> None:
        """Send the current directive now and at every change, until cancelled or until ``send`` fails."""
        changed = asyncio.Event()
        changed.set()
        self._changed[changed] = None
        sent: Directive | None = None
        pace = Pace()
        try:
            while True:
                await changed.wait()
                # Cleared before the send: a change during it is sent afterwards.
                changed.clear()
                if self._told and sent is not self.directive:
                    data, sent = self._for_one_who_has(sent), self.directive
                    await send(data)
                if pace != self.pace:
                    pace = self.pace
                    await send(encode(pace).decode())
        finally:
            self._changed.pop(changed, None)

    def _for_one_who_has(self, sent: Directive | None) -> str | bytes:
        key = None if sent is None else sent.sequence
        if key not in self._encoded:
            self._encoded[key] = self._encode(sent)
        return self._encoded[key]

    def _encode(self, sent: Directive | None) -> str | bytes:
        if sent is not None and len(encode(sent)) >= PACKED_FROM_BYTES:
            update = difference(sent, self.directive)
            if update is not None:
                return pack(update)
        return pack(self.directive)
