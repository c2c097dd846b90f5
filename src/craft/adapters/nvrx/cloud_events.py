"""Report findings of NVRx's launcher and monitors to a lighthouse as CloudEvents; each is journaled once.

For processes that are not workers. They never wait for the lighthouse, and a failed report never becomes a fault of the job.
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
    """Sends to the lighthouse of one run directory."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def tell(self, what: str, **details: str | int | float) -> threading.Thread:
        """Send it on a thread; return the thread, for callers that end right after."""
        thread = threading.Thread(target=self._send, args=(what, details), name="craft-tell", daemon=True)
        thread.start()
        return thread

    def _send(self, what: str, details: dict[str, str | int | float]) -> None:
        cut = {name: value[:_LONGEST_CHARS] if isinstance(value, str) else value for name, value in details.items()}
        try:
            # Looked up each time: a restarted lighthouse may have another address.
            Client.of_run(self._run).cloud_event(_SOURCE, _PREFIX + what, **cut)
        except CraftError as error:
            logger.warning("cannot report %s to the lighthouse: %s", what, error)
