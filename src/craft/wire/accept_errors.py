"""Say once, in plain words, that a server of asyncio can take no connections, and when it can again.

asyncio tries again every second by itself, and those who connect meanwhile wait. It would print a stack each time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)

_MESSAGE = "socket.accept() out of system resource"
_AGAIN = "Exception in callback BaseSelectorEventLoop._start_serving("
_OVER_S = 3.0
"""Some time longer than asyncio's pause: a server that did not fail again meanwhile takes connections."""
ADVICE = "Raise the limit of open files (ulimit -n) or free memory, if this lasts"


class AcceptErrors:
    """The exception handler of an event loop. ``who``: whose server it is, as the beginning of a sentence."""

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
            logger.error("%s can take no connections: %s. Those who connect wait. %s", self._who, why, ADVICE)
        else:
            self._over.cancel()
        self._over = loop.call_later(_OVER_S, self._end)

    def _end(self) -> None:
        self._over = None
        logger.warning("%s takes connections again", self._who)
