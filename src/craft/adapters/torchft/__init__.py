"""torchft under CRAFT's active path: CRAFT detects and aborts, torchft keeps its step, its quorum and its state.

``attend(manager)`` is the one line of a script. Beside the workers runs ``python -m craft.adapters.torchft.lighthouse`` in the
place of ``torchft_lighthouse``: the same lighthouse, behind a door by which CRAFT tells it who is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from craft.adapters.torchft.replica import attend

__all__ = ["attend"]


def __getattr__(name: str) -> Any:
    # Not at import: the lighthouse's process needs neither torch nor torchft's manager.
    if name != "attend":
        raise AttributeError(f"module 'craft.adapters.torchft' has no attribute {name!r}")
    from craft.adapters.torchft.replica import attend

    return attend
