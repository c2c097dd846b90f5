"""Compare steps that are computed a second time with their earlier results: they must be the same.

A job that lost every worker restarts from a checkpoint and recomputes the steps since, from the same state and data: their
metrics must equal those in ``metrics.jsonl``. A job that resumes compares digests of the state after its first steps, which the
leader stored after the checkpoint was taken. If they differ, the script keeps state that is in no checkpoint. Output: nothing,
``BitsDiffer``, or a message. ``CheckpointLifecycle`` calls it, on the main thread.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from craft.decide.step.ledger import Ledger
from craft.decide.techniques import Divergence, Loss
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import BitsDiffer, SnapshotError
from craft.settings.rundir import RunDir
from craft.snapshots.checkpoint import next_steps
from craft.snapshots.checkpoint.next_steps import NextSteps
from craft.snapshots.state.leaves import Leaf, sample_digest
from craft.snapshots.store.store import Store
from craft.telemetry.records.metric_lines import read_metrics
from craft.worker.state.loop_context import LoopContext

logger = logging.getLogger(__name__)

COUNT = 3
"""Steps after a checkpoint whose results are kept: the second shows a learning rate that no checkpoint has."""
_CLOSE_S = 5.0
NOT_METRICS = ("step", "branch", "time")
LOOK_FOR = (
    "the script changes something in its loop that is in no checkpoint (a counter, a torch.Generator of the script, an attribute"
    " such as a dropout rate, a moving average). Register it (job.register, job.register_state), or set it from step.number in"
    " every step"
)


class EarlierResults:
    """What is known of the steps since a checkpoint: their metrics, and digests of the state after them."""

    def __init__(self, context: LoopContext, leaves: Callable[[], list[Leaf]]) -> None:
        """``leaves`` returns the current training state."""
        self._membership = context.membership
        self._run_dir = context.settings.run_dir
        self._comparable = context.settings.check_bits and not _leaves_out(context.techniques)
        self._recomputed: RecomputedSteps | None = None
        self._resumed: ResumedSteps | None = None
        if context.target is not None and self._comparable:
            self._resumed = ResumedSteps(context.target.tiers.durable, leaves, context.settings.position)

    def restored(self, branch: int, step: int) -> None:
        """Expect the results of the steps after a checkpoint that the job begins from."""
        if self._membership.restoration is not None and self._run_dir is not None and self._comparable:
            # The job restarted by itself.
            self._recomputed = RecomputedSteps.read(RunDir(self._run_dir).metrics, step)
        if self._resumed is not None:
            self._resumed.restored(branch, step)

    def rolled_back(self) -> None:
        """Expect nothing: other data follows."""
        self._recomputed = None

    def saved(self, branch: int, step: int) -> None:
        """Keep the results of the steps after a checkpoint that was taken now."""
        if self._resumed is not None:
            self._resumed.saved(branch, step)

    def check_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise BitsDiffer if ``step`` gave other metrics before the job restarted."""
        if self._recomputed is not None:
            self._recomputed.check(step, metrics)

    def check_state(self, step: int, ledger: Ledger) -> str | None:
        """Return a message if the state after ``step`` steps was different before, else None."""
        return self._resumed.at_boundary(step, _leads(ledger)) if self._resumed is not None else None

    @property
    def same_script(self) -> bool:
        """Whether this is the script that computed the steps before."""
        return self._resumed is not None and self._resumed.same_script

    def close(self) -> None:
        if self._resumed is not None:
            self._resumed.close()


def _leads(ledger: Ledger) -> bool:
    """Return whether this worker stores the digests of its position: the first of its twins does."""
    if not ledger.layout.slots:
        return ledger.rank == 0
    return ledger.rank == ledger.layout.column(ledger.layout.position_of(ledger.rank), len(ledger.members))[0]


def _leaves_out(techniques: Chosen) -> bool:
    """Return whether a step may be recomputed with other samples than the first time."""
    loss, divergence = techniques.get(Loss), techniques.get(Divergence)
    shrinks = loss is not None and loss.settings.answer == "shrink"
    return shrinks or (divergence is not None and divergence.settings.answer == "rollback")


class RecomputedSteps:
    """The first results of the steps from one on."""

    def __init__(self, expected: Mapping[int, Mapping[str, Any]]) -> None:
        self._expected = dict(expected)
        self._last = max(self._expected, default=-1)

    @classmethod
    def read(cls, path: Path, first: int) -> RecomputedSteps:
        """Read the steps from ``first`` on from a ``metrics.jsonl``; of a repeated step, the newest line."""
        lines = {line["step"]: line for line in read_metrics(path) if line["step"] >= first}
        return cls({step: _values(line) for step, line in lines.items()})

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise BitsDiffer if ``step`` gave other metrics before."""
        if step > self._last or (expected := self._expected.pop(step, None)) is None:
            return
        # Through JSON, like the expected values: it turns non-finite numbers into null.
        found = _values(msgspec.json.decode(msgspec.json.encode(dict(metrics))))
        names = [name for name in expected if name in found]
        # One match is enough: a script may also log times and rates, which always differ.
        if not names or any(expected[name] == found[name] for name in names):
            return
        name = names[0]
        raise BitsDiffer(
            f"step {step} was computed again after the job began again from a checkpoint, and gave {name} {found[name]}"
            f" instead of {expected[name]}: {LOOK_FOR}. --no-check-bits lets the job go on"
        )


def _values(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in NOT_METRICS}


class ResumedSteps:
    """The comparison for one loop on one worker. Owned by the main thread; a separate thread writes."""

    def __init__(self, store: Store, leaves: Callable[[], list[Leaf]], position: int = 0) -> None:
        """``leaves`` returns the current training state of ``position``."""
        self._store = store
        self._position = position
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
            self._expected = next_steps.read(self._store, branch, step, self._position)
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
            next_steps.keep(self._store, branch, recorded, self._position)
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
