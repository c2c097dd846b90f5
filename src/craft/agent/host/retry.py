"""Retry a call at a fixed interval, up to a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def retry(
    call: Callable[[], Awaitable[T]],
    on: type[Exception],
    *,
    limit_s: float,
    every_s: float,
    failed_first: Callable[[Exception], None] = lambda _: None,
) -> T:
    """Return what ``call`` returns; while it raises ``on``, call it again. After ``limit_s``, raise the last error."""
    deadline, is_first = time.monotonic() + limit_s, True
    while True:
        try:
            return await call()
        except on as error:
            if time.monotonic() > deadline:
                raise
            if is_first:
                failed_first(error)
            is_first = False
        await asyncio.sleep(every_s)
