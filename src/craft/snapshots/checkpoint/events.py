"""Report checkpoints of a worker's threads as events. ``writer.py`` and ``tier_copier.py`` call it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from craft.protocol.events import AnyNote, CheckpointFailed, CheckpointWritten
from craft.snapshots.store.manifest import Manifest

logger = logging.getLogger(__name__)


class CheckpointEvents:
    """Makes events and passes them on; errors of the receiver are logged."""

    def __init__(self, worker_id: str, on_event: Callable[[AnyNote], None]) -> None:
        self._worker_id = worker_id
        self._on_event = on_event

    def written(self, manifest: Manifest, url: str, seconds: float) -> None:
        self._tell(
            CheckpointWritten(
                name=manifest.name,
                branch=manifest.branch,
                step=manifest.step,
                url=url,
                tag=manifest.tag,
                total_bytes=manifest.total_bytes,
                new_bytes=manifest.new_bytes,
                # By the wall clock, which may have been set back meanwhile.
                seconds=max(0.0, seconds),
            )
        )

    def failed(self, name: str, step: int, error: Exception, tries: int, retry_s: float | None) -> None:
        logger.warning("a share of checkpoint %s was not written: %s", name, error)
        text = str(error) or repr(error)
        self._tell(
            CheckpointFailed(worker_id=self._worker_id, name=name, step=step, error=text, tries=tries, retry_s=retry_s)
        )

    def _tell(self, event: AnyNote) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("event %s could not be delivered", event)
