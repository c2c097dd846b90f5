"""What NVRx's launcher and monitors find, told to a lighthouse as CloudEvents: each becomes a line of its journal, once.

For processes that are no workers. Nobody waits for the lighthouse, and a fault in telling never becomes one of the job's.
"""

from __future__ import annotations

import logging
import threading

from craft.protocol.errors import CraftError
from craft.settings.rundir import RunDir
from craft.wire.client import Client

logger = logging.getLogger(__name__)

_SOURCE = "nvidia-resiliency-ext"
_PREFIX = "nvrx."
_LONGEST_CHARS = 1000


class EventSender:
    """Tells the lighthouse of one run directory."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def tell(self, what: str, **details: str | int | float) -> threading.Thread:
        """Send it on a thread of its own, which is returned for those who end right after."""
        thread = threading.Thread(target=self._send, args=(what, details), name="craft-tell", daemon=True)
        thread.start()
        return thread

    def _send(self, what: str, details: dict[str, str | int | float]) -> None:
        cut = {name: value[:_LONGEST_CHARS] if isinstance(value, str) else value for name, value in details.items()}
        try:
            # Looked up each time: a lighthouse that was started again may have another address.
            Client.of_run(self._run).cloud_event(_SOURCE, _PREFIX + what, **cut)
        except CraftError as error:
            logger.warning("the lighthouse was not told of %s: %s", what, error)
