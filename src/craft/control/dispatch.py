"""Messages out: the whole target, to every agent, at once.

``Dispatch`` keeps the current directive. Each connection has a task of its own that sends the latest one: an agent that
does not read delays nobody, and gets one directive, not a queue of old ones, when it reads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from craft.decide.membership import JobState
from craft.protocol.messages import Directive
from craft.wire.codec import encode

Send = Callable[[str], Awaitable[None]]


def directive_of(state: JobState, sequence: int) -> Directive:
    """Return what everybody is to do, as one value."""
    stop = state.stopping
    return Directive(
        sequence=sequence,
        generation=state.generation,
        upcoming=state.upcoming,
        # Every lost worker must end, however it was lost: one that still runs somewhere has no other way to know.
        fenced=tuple(view.member.worker_id for view in state.having("lost")),
        winding_down=state.winding_down,
        stopping=stop is not None,
        exit_code=stop.exit_code if stop is not None else 0,
        reason=stop.reason if stop is not None else "",
        traceback=stop.traceback if stop is not None else None,
    )


class Dispatch:
    """The current directive, and those who are to hear of it."""

    def __init__(self, first_sequence: int) -> None:
        """``first_sequence`` must be above any that an earlier lighthouse of this job gave out."""
        self._directive = Directive(sequence=first_sequence)
        self._text = ""
        self._changed: set[asyncio.Event] = set()

    @property
    def directive(self) -> Directive:
        return self._directive

    def tell(self, state: JobState) -> None:
        """Make what ``state`` wants the current directive; nothing is sent if it is the same as before."""
        wanted = directive_of(state, self._directive.sequence)
        if wanted == self._directive and self._text:
            return
        self._directive = replace(wanted, sequence=wanted.sequence + 1)
        self._text = encode(self._directive).decode()
        for changed in self._changed:
            changed.set()

    async def serve(self, send: Send) -> None:
        """Send the current directive now and whenever it changes, until cancelled or until ``send`` fails."""
        changed = asyncio.Event()
        changed.set()
        self._changed.add(changed)
        try:
            while True:
                await changed.wait()
                # Cleared before the text is taken: a change during the send is sent afterwards.
                changed.clear()
                if self._text:
                    await send(self._text)
        finally:
            self._changed.discard(changed)
