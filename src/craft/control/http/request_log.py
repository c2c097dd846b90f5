"""Log unreadable HTTP requests: one line each, rate-limited, without their content.

Anyone who reaches the port can send such requests without the token. Passed to aiohttp as its logger, and to
``connection_limits``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from craft.control.agents.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

PER_S = 0.1
BURST = 10.0


class RequestLog:
    """Logs unauthenticated requests, rate-limited. Lives on the lighthouse's event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._bucket = TokenBucket(PER_S, BURST, now())
        self._left_out = 0
        self._timer: asyncio.TimerHandle | None = None

    def warning(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a line, unless there were many lately: those are counted, and the count is logged later."""
        pause_s = self._bucket.pause_s(1, self._now())
        if pause_s > 0:
            self._left_out += 1
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(pause_s, self._say_left_out)
            return
        self._bucket.take(1, self._now())
        logger.warning(message, *args, exc_info=exc_info)

    def exception(self, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Called by aiohttp. Logs the kind of error only: its text quotes the request."""
        if isinstance(exc_info, HttpProcessingError):
            remote = args[0] if args else "an unknown address"
            self.warning("a request from %s cannot be read and was refused (%s)", remote, type(exc_info).__name__)
        else:
            self.warning(message, *args, exc_info=exc_info)

    def debug(self, *args: Any, **kwargs: Any) -> None:
        """Called by aiohttp for usual events, such as connections that end early."""

    def close(self) -> None:
        """Log how many lines were dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._say_left_out()

    def _say_left_out(self) -> None:
        self._timer = None
        logger.warning("%d more such messages about requests were left out", self._left_out)
        self._left_out = 0
