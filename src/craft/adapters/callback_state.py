"""Decide which states of a framework's callbacks can follow the job: those made of tensors and plain data."""

from __future__ import annotations

import logging
from typing import Any

from craft.snapshots.state.tree import obstacle

logger = logging.getLogger(__name__)


class CallbackState:
    """Warns once about each callback whose state cannot follow."""

    def __init__(self) -> None:
        self._left_out: set[str] = set()

    def allows(self, callback: str, state: Any) -> bool:
        """Return whether this state of ``callback`` can be sent to another worker."""
        found = obstacle(callback, state)
        if found is not None and callback not in self._left_out:
            self._left_out.add(callback)
            logger.warning("the state of callback %s does not follow the job: %s", callback, found)
        return found is None
