"""The checkpoints that a job may begin from or roll back to, as its leader finds them in the stores."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from craft.protocol.errors import SnapshotError
from craft.protocol.events import CheckpointRejected, ScriptWarned
from craft.protocol.messages import Restoration
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.suspect import SuspectCheckpoints, Suspicion, mark
from craft.snapshots.store.manifest import Manifest, place_of_name
from craft.snapshots.store.owner import StoreTaken, check_owner
from craft.snapshots.store.tiers import Tiers
from craft.worker.membership.participant import Participant
from craft.worker.report.reporter import Reporter

logger = logging.getLogger(__name__)


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoints that rank 0 finds in the stores."""

    names: tuple[tuple[str, int], ...] = ()
    """Newest first, each with the branch that continues from it."""
    problem: str = ""
    """Why rank 0 has nothing to offer, if there is a problem."""


class RollbackCandidates:
    """Lists and judges checkpoints. Owned by the main thread."""

    def __init__(self, tiers: Tiers, participant: Participant, reporter: Reporter) -> None:
        self.url = tiers.durable.url
        self.rejected = False
        """Whether an unusable checkpoint was found."""
        self.named: int | None = None
        """The step that the user named: its checkpoint is used even if it is suspect."""
        self._offered: list[Manifest] = []
        """The checkpoints that the last offer was made of."""
        self._tiers = tiers
        self._participant = participant
        self._reporter = reporter

    def listed(self) -> list[Manifest]:
        """Return every readable checkpoint of a job, newest first. Raises SnapshotError if a store does not answer."""
        return [each for each in candidates(self._tiers, self._reject) if each.kind == "job"]

    def find(self, name: str) -> Manifest | None:
        """Return the checkpoint with this name, if it is listed."""
        return next((each for each in self.listed() if each.name == name), None)

    def reject_offered(self, name: str, reason: str) -> None:
        """Report a checkpoint that was offered and that a member cannot use."""
        step = next(each.step for each in self._offered if each.name == name)
        self._reject(CheckpointRejected(name=name, step=step, url=self.url, reason=reason))

    def _reject(self, event: CheckpointRejected) -> None:
        logger.warning("checkpoint %s cannot be used: %s", event.name, event.reason)
        self.rejected = True
        self._reporter.note(event)

    def doubt(self, agreed: int, step: int, reason: str) -> None:
        """Mark the checkpoints since ``agreed`` steps as suspect: bits differ in ``step``, and last agreed then."""
        found = Suspicion(branch=self._participant.ledger.branch, after=agreed, step=step, reason=reason)
        try:
            mark(self._tiers.nearest_first, found)
        except SnapshotError as error:
            logger.error(
                "checkpoints after step %d may hold wrong bits, and cannot be marked so (%s): remove them by hand, with"
                " 'craft checkpoints rm'",
                agreed,
                error,
            )
        else:
            logger.warning("checkpoints after step %d may hold wrong bits, and are marked so in %s", agreed, self.url)

    def _trusted(self, found: list[Manifest], doubts: SuspectCheckpoints) -> list[Manifest]:
        """Return the checkpoints that are not suspect or that the user named; report the others."""
        trusted = []
        for each in found:
            doubt = doubts.about(each)
            if doubt is None:
                trusted.append(each)
            elif each.step == self.named:
                text = f"goes on from the checkpoint of step {each.step}, as --resume {each.step} says, though {doubt}"
                logger.warning("%s", text)
                self._reporter.note(ScriptWarned(text=text))
                trusted.append(each)
            else:
                self._reject(CheckpointRejected(name=each.name, step=each.step, url=self.url, reason=str(doubt)))
        return trusted

    def offer(self, wanted: int | None, next_branch: bool, again: Restoration | None, at_least: int) -> Offer:
        """Return the checkpoints that all may read; the arguments are those of ``Rollback.prepare``."""
        try:
            if next_branch or (again is not None and again.checkpoint is not None):
                check_owner(self._tiers.durable, self._tiers.owner)
            found = self._offered = self.listed()
            doubts = SuspectCheckpoints(self._tiers.nearest_first)
        except StoreTaken as error:
            return Offer(problem=str(error))
        except SnapshotError as error:
            return Offer(problem=f"{self.url} does not say which checkpoints there are: {error}")
        trusted = self._trusted(found, doubts)
        if found and not trusted:
            return Offer(problem=_only_doubted(self.url, found))
        if again is not None:
            own = [each for each in trusted if _is_of_course(each, again) and wanted in (None, each.step)]
            return Offer(tuple((each.name, again.branch) for each in own))
        # Also past this worker's branch: a restarted job may be in one that has no checkpoint yet.
        new = max((self._participant.ledger.branch, *doubts.branches, *(each.branch for each in found))) + 1
        names = []
        for each in trusted:
            if next_branch and not self._is_behind(each):
                continue
            if each.step == wanted or (wanted is None and each.step >= at_least):
                # Beside newer checkpoints it starts a separate branch: they must not count as its continuation.
                apart = next_branch or each.order < found[0].order or each.branch in doubts.branches
                names.append((each.name, new if apart else each.branch))
        return Offer(tuple(names))

    def _is_behind(self, manifest: Manifest) -> bool:
        """Return whether going there is going back: a store may hold another branch that got further than this one."""
        ledger = self._participant.ledger
        if ledger.loop > 1 and manifest.step <= ledger.first_step:
            # It belongs to an earlier loop of the script.
            return False
        return manifest.branch <= ledger.branch and manifest.step <= self._participant.step


def _only_doubted(url: str, found: Sequence[Manifest]) -> str:
    steps = ", ".join(str(each.step) for each in found)
    return (
        f"every checkpoint in {url} may hold wrong bits (of steps {steps}): bits differed between workers after they were"
        f" last known to be the same ('craft checkpoints ls {url}' says when). Name a step to go on from it all the same:"
        f" --resume {found[0].step}"
    )


def _is_of_course(manifest: Manifest, again: Restoration) -> bool:
    """Return whether a checkpoint is not newer than the one that the job restarts from."""
    newest = place_of_name(again.checkpoint) if again.checkpoint is not None else None
    return newest is None or (manifest.branch, manifest.step) <= newest
