"""Named points of a step at which tests place a fault. Nothing listens unless ``craft.testing`` was armed.

Points on the main thread: join, batch, flushed, committed, entering, claimed. On the exchange thread: blocks_sent,
result_sent, before_acknowledge, acknowledging. On the opening thread: opening, opened.
"""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[str, int], None] | None = None


def listen(listener: Callable[[str, int], None] | None) -> None:
    """Call ``listener(point, step)`` whenever a point is reached; None ends that."""
    global _listener
    _listener = listener


def reach(point: str, step: int) -> None:
    if _listener is not None:
        _listener(point, step)
