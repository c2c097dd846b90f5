"""Wait for something: retry a call up to a limit, or wait for the first of two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def retry(
    call: Callable[[], Awaitable[T]],
    on: type[Exception],
    *,
    limit_s: float,
    every_s: float,
    failed: Callable[[Exception], None] = lambda _: None,
) -> T:
    """Return what ``call`` returns; while it raises ``on``, call it again. After ``limit_s``, raise the last error.

    ``failed`` gets each error that differs from the one before.
    """
    deadline, said = time.monotonic() + limit_s, ""
    while True:
        try:
            return await call()
        except on as error:
            if time.monotonic() > deadline:
                raise
            if str(error) != said:
                failed(error)
            said = str(error)
        await asyncio.sleep(every_s)


async def first_of(event: asyncio.Event, other: asyncio.Future[Any]) -> None:
    """Wait until ``event`` is set or ``other`` is done."""
    waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
    await asyncio.wait((waiting, other), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
