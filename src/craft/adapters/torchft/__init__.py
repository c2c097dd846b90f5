"""torchft under CRAFT's active path: CRAFT detects and aborts; torchft keeps its step, quorum and state.

``attend(manager)`` is the one line of a script. Beside the workers runs ``python -m craft.adapters.torchft.lighthouse`` instead
of ``torchft_lighthouse``: the same lighthouse behind a proxy, through which CRAFT reports losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from craft.adapters.torchft.replica import attend

__all__ = ["attend"]


def __getattr__(name: str) -> Any:
    # Lazy: the lighthouse's process needs neither torch nor torchft's manager.
    if name != "attend":
        raise AttributeError(f"module 'craft.adapters.torchft' has no attribute {name!r}")
    from craft.adapters.torchft.replica import attend

    return attend
