"""Messages out: the whole target, to every agent, at once.

``Dispatch`` keeps the current directive. Each connection has a task of its own that sends the latest one: an agent that
does not read delays nobody, and gets one directive, not a queue of old ones, when it reads again. A large directive goes
out whole once per connection, packed; then as an update of what was sent before. Each is encoded once for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from craft.decide.job.last_copy import holders
from craft.decide.job.state import JobState
from craft.protocol.heartbeats import Pace
from craft.protocol.messages import Directive
from craft.wire.codec import PACKED_FROM_BYTES, encode, pack
from craft.wire.deltas import difference

Send = Callable[[str | bytes], Awaitable[None]]


def directive_of(state: JobState, sequence: int) -> Directive:
    """Return what everybody is to do, as one value."""
    stop = state.stopping
    return Directive(
        sequence=sequence,
        slots=state.slots,
        generation=state.generation,
        upcoming=state.upcoming,
        # Every lost worker must end, however it was lost: one that still runs somewhere has no other way to know.
        fenced=tuple(view.member.worker_id for view in state.having("lost") if not view.ended),
        released=tuple(view.member.worker_id for view in state.having("left") if view.entered == 0),
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


class Dispatch:
    """The current directive and pace, and those who are to hear of them."""

    def __init__(self, first_sequence: int) -> None:
        """``first_sequence`` must be above any that an earlier lighthouse of this job gave out."""
        self._directive = Directive(sequence=first_sequence)
        self._told = False
        self._pace = Pace()
        self._encoded: dict[int | None, str | bytes] = {}
        """The current directive for a connection on which the one of this number was sent last; None: none was."""
        self._changed: dict[asyncio.Event, None] = {}
        """In the order in which they came."""

    @property
    def directive(self) -> Directive:
        return self._directive

    @property
    def pace(self) -> Pace:
        return self._pace

    def tell(self, state: JobState) -> None:
        """Make what ``state`` wants the current directive; nothing is sent if it is the same as before."""
        wanted = directive_of(state, self._directive.sequence)
        if self._told and wanted == self._directive:
            return
        self._directive = replace(wanted, sequence=wanted.sequence + 1)
        self._told = True
        self._encoded.clear()
        self._wake()

    def set_pace(self, pace: Pace) -> None:
        """Have every agent keep this pace."""
        if pace != self._pace:
            self._pace = pace
            self._wake()

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()

    async def serve(self, send: Send) -> None:
        """Send what is current now and whenever it changes, until cancelled or until ``send`` fails."""
        changed = asyncio.Event()
        changed.set()
        self._changed[changed] = None
        sent: Directive | None = None
        pace = Pace()
        try:
            while True:
                await changed.wait()
                # Cleared before anything is taken: a change during the send is sent afterwards.
                changed.clear()
                if self._told and sent is not self._directive:
                    data, sent = self._for_one_who_has(sent), self._directive
                    await send(data)
                if pace != self._pace:
                    pace = self._pace
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
            update = difference(sent, self._directive)
            if update is not None:
                return pack(update)
        return pack(self._directive)
