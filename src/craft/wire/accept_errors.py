"""Log once that an asyncio server cannot accept connections, and once when it can again.

asyncio retries every second and would print a traceback each time. Clients wait in the backlog meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)

_MESSAGE = "socket.accept() out of system resource"
_AGAIN = "Exception in callback BaseSelectorEventLoop._start_serving("
_OVER_S = 3.0
"""Longer than asyncio's pause between retries: a server that has not failed for this long accepts again."""
ADVICE = "Raise the limit of open files (ulimit -n) or free memory, if this lasts"


class AcceptErrors:
    """Exception handler of an event loop. ``who`` names the server, at the start of a sentence."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._over: asyncio.TimerHandle | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context.get("message"))
        if message.startswith(_AGAIN) and isinstance(context.get("exception"), ValueError):
            # The server was closed before asyncio tried again.
            return
        if message != _MESSAGE:
            loop.default_exception_handler(context)
            return
        if self._over is None:
            error = context.get("exception")
            why = getattr(error, "strerror", None) or error
            logger.error("%s cannot accept connections: %s. Clients wait. %s", self._who, why, ADVICE)
        else:
            self._over.cancel()
        self._over = loop.call_later(_OVER_S, self._end)

    def _end(self) -> None:
        self._over = None
        logger.warning("%s accepts connections again", self._who)
