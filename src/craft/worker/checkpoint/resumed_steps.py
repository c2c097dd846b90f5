"""Compare the first steps after a resume with their earlier results.

A checkpoint holds the state that the script registers. If the loop changes anything else, a job that resumes computes other bits.
So the leader stores a digest of the state after each of the next steps, and a job that begins from that checkpoint compares its
digests. ``CheckpointLifecycle`` calls it, on the main thread. Input: the state at step boundaries. Output: a small file in the
store, and a message if the states differ.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from msgspec.structs import replace

from craft.protocol.errors import SnapshotError
from craft.snapshots.checkpoint import next_steps
from craft.snapshots.checkpoint.next_steps import NextSteps
from craft.snapshots.state.leaves import Leaf, sample_digest
from craft.snapshots.store.store import Store
from craft.worker.checkpoint.recomputed_steps import LOOK_FOR

logger = logging.getLogger(__name__)

COUNT = 3
"""Steps after a checkpoint whose results are kept: the second shows a learning rate that no checkpoint has."""
_CLOSE_S = 5.0


class ResumedSteps:
    """The comparison for one loop on one worker. Owned by the main thread; a separate thread writes."""

    def __init__(self, store: Store, leaves: Callable[[], list[Leaf]]) -> None:
        """``leaves`` returns the current training state."""
        self._store = store
        self._leaves = leaves
        self._script = script_digest()
        self._branch = 0
        self._recorded: NextSteps | None = None
        self._expected: NextSteps | None = None
        self._writer: threading.Thread | None = None

    def saved(self, branch: int, step: int) -> None:
        """Start recording after a checkpoint of ``step`` steps."""
        self._branch, self._recorded = branch, NextSteps(step=step, script=self._script, digests={})

    def restored(self, branch: int, step: int) -> None:
        """Read the expected digests of the checkpoint that the job resumes from."""
        try:
            self._expected = next_steps.read(self._store, branch, step)
        except SnapshotError as error:
            logger.info("what the steps after the checkpoint gave before is not known: %s", error)

    def at_boundary(self, step: int, leads: bool) -> str | None:
        """Check the state after ``step`` steps; return a message if it was different before, else None."""
        expected = self._expected.digests.get(step) if self._expected is not None else None
        recorded = leads and self._recorded is not None and 0 < step - self._recorded.step <= COUNT
        if expected is None and not recorded:
            return None
        digest = sample_digest(self._leaves()).hex()
        if recorded:
            self._record(step, digest)
        return self._complaint(step) if expected is not None and expected != digest else None

    @property
    def same_script(self) -> bool:
        """Whether this is the script that computed the steps before."""
        return self._expected is not None and self._expected.script == self._script

    def _record(self, step: int, digest: str) -> None:
        assert self._recorded is not None
        self._recorded = replace(self._recorded, digests={**self._recorded.digests, step: digest})
        if self._writer is None or not self._writer.is_alive():
            # If a write is in progress, the next step's write includes this digest.
            self._writer = threading.Thread(
                target=self._write, args=(self._branch, self._recorded), name="craft-next-steps", daemon=True
            )
            self._writer.start()

    def _write(self, branch: int, recorded: NextSteps) -> None:
        try:
            next_steps.keep(self._store, branch, recorded)
        except SnapshotError as error:
            logger.info("what the steps after checkpoint %d gave is not kept: %s", recorded.step, error)

    def _complaint(self, step: int) -> str:
        assert self._expected is not None
        which = "the same script" if self.same_script else "another version of the script, or other arguments"
        return (
            f"step {step - 1} was computed again from the checkpoint of step {self._expected.step}, by {which}, and left another"
            f" state than before: {LOOK_FOR}. Another kind of device or another version of torch shows in the same way."
            " --no-check-bits lets the job go on"
        )

    def close(self) -> None:
        """Wait a while for a write in progress."""
        if self._writer is not None:
            self._writer.join(_CLOSE_S)


def script_digest() -> str:
    """Return a hash of the script that this process runs, and of its arguments."""
    hasher = blake3("\0".join(sys.argv[1:]).encode())
    file = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    try:
        hasher.update(Path(file).read_bytes())
    except OSError:
        hasher.update(file.encode())
    return hasher.hexdigest(length=16)
