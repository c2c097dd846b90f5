"""Begin from a checkpoint or roll back to one, all workers together, each verifying every byte.

Input: the lists in the stores. Output: the state of this worker's objects, replaced. It follows the rule of the steps: a worker
that rolls back knows that all have read and verified the same checkpoint; if one is lost meanwhile, the members of the new
generation settle whether all roll back (``decide.step.settle``). Owned by the main thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import msgspec
import torch

from craft.decide.step.ledger import Ledger
from craft.decide.techniques import Divergence, Stragglers
from craft.protocol.errors import Refused, SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.protocol.events import CheckpointRejected, ScriptWarned
from craft.protocol.messages import Restoration
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.restore import Restored, restore
from craft.snapshots.checkpoint.suspect import SuspectCheckpoints, Suspicion, mark
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.serialized import load
from craft.snapshots.store.manifest import CHUNKS, MANIFESTS, PARTS, Manifest, place_of_name
from craft.snapshots.store.owner import StoreTaken, check_owner, claim
from craft.snapshots.store.tiers import Tiers
from craft.telemetry.fault_points import reach
from craft.worker.checkpoint.shared_store import check_one_store
from craft.worker.membership.ft_calls import exchange
from craft.worker.membership.participant import Participant
from craft.worker.report.reporter import Reporter
from craft.worker.state.metadata import Attached, Conditions, ModuleModes, TrainingProgress

logger = logging.getLogger(__name__)

_AWAY_S = (1.0, 5.0, 15.0, 0.0)
"""Delays before an unresponsive store is asked again: the newest checkpoint is worth some patience."""
_MAY_CHANGE = frozenset(
    {
        "check_bits",
        "digest_bytes",
        "bucket_mb",
        "group",
        "steps",
        "epochs",
        "loss.answer",
        *(f"{Divergence.name}.{key}" for key in Divergence.shared),
        *(f"{Stragglers.name}.{key}" for key in Stragglers.shared),
    }
)
"""Settings that may change when a job resumes from a checkpoint."""


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoints that rank 0 finds in the stores."""

    names: tuple[tuple[str, int], ...] = ()
    """Newest first, each with the branch that continues from it."""
    problem: str = ""
    """Why rank 0 has nothing to offer, if there is a problem."""


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """One member's answer about the chosen checkpoint."""

    problem: str = ""
    """Why it cannot be used; empty if it can."""


class Rollback:
    """Chooses, verifies and loads a checkpoint on one worker."""

    def __init__(
        self,
        tiers: Tiers,
        participant: Participant,
        reporter: Reporter,
        modules: Mapping[str, torch.nn.Module],
        registered: Mapping[str, Stateful],
        attached: Attached,
    ) -> None:
        """``attached``: the metadata of the state when the loop begins."""
        self._tiers = tiers
        self._participant = participant
        self._reporter = reporter
        self._modules = modules
        self._registered = registered
        self._conditions = attached.conditions
        self._began = attached.began
        self._in_hand: Restored | None = None
        self.rejected = False
        """Whether an unusable checkpoint was found."""
        self.named: int | None = None
        """The step that the user named: its checkpoint is used even if it is suspect."""
        self._loaded = 0
        """How often a checkpoint was loaded into the state here."""

    @property
    def url(self) -> str:
        return self._tiers.durable.url

    def listed(self) -> list[Manifest]:
        """Return every readable checkpoint of a job, newest first. Raises SnapshotError if a store does not answer."""
        return [each for each in candidates(self._tiers, self._rejected) if each.kind == "job"]

    def _rejected(self, event: CheckpointRejected) -> None:
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
                self._rejected(CheckpointRejected(name=each.name, step=each.step, url=self.url, reason=str(doubt)))
        return trusted

    def prepare(
        self, wanted: int | None, next_branch: bool, again: Restoration | None = None, at_least: int = 0
    ) -> str | None:
        """Agree with all workers on the newest checkpoint that all can read (or that of step ``wanted``), and read it.

        ``again``: the job restarts, in the given branch, from at most the given checkpoint. ``at_least``: the script itself has
        come to that step, so no older checkpoint helps. Returns why there is no usable checkpoint, else None. Raises GroupError
        if a worker is lost; then all may have read it, or have rolled back.
        """
        self._discard()
        leads = self._participant.ledger.rank == 0
        offer, found = self._offer(wanted, next_branch, again, at_least) if leads else (_Offer(), [])
        offer = msgspec.json.decode(self._exchange(msgspec.json.encode(offer))[0], type=_Offer)
        if offer.problem:
            return offer.problem
        reasons: list[str] = []
        for name, branch in offer.names:
            problem = self._read(name, branch, next_branch)
            answers = self._exchange(msgspec.json.encode(_Answer(problem)))
            problems = [each.problem for each in (msgspec.json.decode(one, type=_Answer) for one in answers)]
            problem = next((each for each in problems if each), "")
            if not problem:
                reach("verified", self._participant.step)
                return None
            self._discard()
            reasons.append(f"{name}: {problem}")
            if leads:
                step = next(each.step for each in found if each.name == name)
                self._rejected(CheckpointRejected(name=name, step=step, url=self.url, reason=problem))
        if reasons:
            return f"none of the {len(reasons)} checkpoints in {self.url} can be used ({'; '.join(reasons)})"
        return f"there is no checkpoint{'' if wanted is None else f' of step {wanted}'} in {self.url}"

    def _discard(self) -> None:
        """Discard the checkpoint that was read: no worker rolled back to it, and it must not look usable."""
        self._participant.discard_checkpoint()
        self._in_hand = None

    def _offer(
        self, wanted: int | None, next_branch: bool, again: Restoration | None, at_least: int
    ) -> tuple[_Offer, list[Manifest]]:
        try:
            if next_branch or (again is not None and again.checkpoint is not None):
                check_owner(self._tiers.durable, self._tiers.owner)
            found = self.listed()
            doubts = SuspectCheckpoints(self._tiers.nearest_first)
        except StoreTaken as error:
            return _Offer(problem=str(error)), []
        except SnapshotError as error:
            return _Offer(problem=f"{self.url} does not say which checkpoints there are: {error}"), []
        trusted = self._trusted(found, doubts)
        if found and not trusted:
            return _Offer(problem=_only_doubted(self.url, found)), found
        if again is not None:
            own = [each for each in trusted if _is_of_course(each, again) and wanted in (None, each.step)]
            return _Offer(tuple((each.name, again.branch) for each in own)), found
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
        return _Offer(tuple(names)), found

    def _is_behind(self, manifest: Manifest) -> bool:
        """Return whether going there is going back: a store may hold another branch that got further than this one."""
        ledger = self._participant.ledger
        if ledger.loop > 1 and manifest.step <= ledger.first_step:
            # It belongs to an earlier loop of the script.
            return False
        return manifest.branch <= ledger.branch and manifest.step <= self._participant.step

    def _exchange(self, data: bytes) -> list[bytes]:
        return exchange(self._participant, data)

    def _read(self, name: str, branch: int, next_branch: bool) -> str:
        """Read and verify a checkpoint and keep it; return why it cannot be used, or ""."""
        # Not yet into the modules of a running job: perhaps no worker rolls back.
        modules = None if next_branch else self._modules
        for wait_s in _AWAY_S:
            try:
                manifest = next((each for each in self.listed() if each.name == name), None)
                if manifest is None:
                    return f"worker {self._participant.ledger.worker_id} does not find it"
                restored = restore(self._tiers, manifest, modules)
                break
            except (SnapshotMissing, SnapshotCorrupt) as error:
                return str(error)
            except SnapshotError as error:
                problem = str(error)
                logger.warning("checkpoint %s cannot be read now: %s", name, error)
                time.sleep(wait_s)
        else:
            return problem
        attached = msgspec.json.decode(restored.header.conditions, type=Attached)
        self._check(attached.conditions)
        self._in_hand = restored
        self._participant.verify_checkpoint(branch, manifest.step)
        return ""

    def _check(self, then: Conditions) -> None:
        """Raise Refused unless it is the same job: the same settings must lead to the same data in the same order."""
        loop, own = then.settings.get("loop", 1), self._conditions.settings.get("loop", 1)
        if loop != own:
            raise Refused(
                f"the checkpoint is of training loop {loop} of the script, and this is loop {own}: a job goes on from a"
                " checkpoint only in its first loop, since the code between the loops would be run again with another state."
                " Put the loops into scripts of their own, each with its own place for checkpoints"
            )
        for key in sorted((then.settings.keys() | self._conditions.settings.keys()) - _MAY_CHANGE):
            was, now = then.settings.get(key), self._conditions.settings.get(key)
            if was != now:
                raise Refused(
                    f"the checkpoint is of a job with {key}={was!r}, and this one has {key}={now!r}: it cannot go on from"
                    " there, since other samples would follow; give it the same, or start without --resume in another place"
                )
        for key in ("device", "torch_version", "num_threads", "deterministic"):
            was, now = getattr(then, key), getattr(self._conditions, key)
            if was != now:
                logger.warning("the checkpoint was made with %s=%r, this job has %r: bits may differ", key, was, now)

    def check_writable(self) -> None:
        """Raise Refused if the workers cannot all write to one store: better now than at the first checkpoint."""
        try:
            for store in self._tiers.nearest_first:
                with store.writing(self._participant.ledger.worker_id):
                    pass
            check_one_store(self._tiers.durable, self._participant)
        except SnapshotError as error:
            raise Refused(f"checkpoints cannot be written: {error}") from error

    def claim(self) -> None:
        """Claim the store for this job, so that no other job writes there. Raises Refused if that fails."""
        if self._participant.ledger.rank == 0:
            try:
                claim(self._tiers.durable, self._tiers.owner)
            except SnapshotError as error:
                raise Refused(f"checkpoints cannot be written: {error}") from error

    def warn_of_rests(self) -> None:
        """Warn, on the leader, if a job that should resume begins anew in a store that holds data."""
        if self._participant.ledger.rank != 0:
            return
        store = self._tiers.durable
        if store.files(CHUNKS) or store.files(PARTS):
            text = (
                f"--resume: {self.url} holds parts of checkpoints and lists none: either none was ever complete, or the files in"
                f" {MANIFESTS}/ were removed. The job begins anew, and what is there is removed after its next checkpoint"
            )
            logger.warning("%s", text)
            self._reporter.note(ScriptWarned(text=text))

    def check_fresh(self) -> None:
        """Raise Refused if a new job would write among another job's checkpoints."""
        listed = self.listed()
        if listed:
            raise Refused(
                f"{self.url} holds checkpoints already, the newest of step {listed[0].step}: go on from there"
                " with --resume, or choose another place"
            )

    def go(self) -> None:
        """Roll back: all workers have read the checkpoint."""
        self._participant.go_back()

    def follow(self) -> tuple[Manifest, TrainingProgress] | None:
        """Load the checkpoint into this worker's objects, if it rolled back, directly or by a settlement."""
        if self._participant.ledger.rewinds == self._loaded or self._in_hand is None:
            return None
        restored, self._in_hand = self._in_hand, None
        self._loaded = self._participant.ledger.rewinds
        attached = msgspec.json.decode(restored.header.conditions, type=Attached)
        self._switch(attached)
        load(restored.header, restored.tensors, self._modules, self._registered)
        logger.info("took the state of checkpoint %s", restored.manifest.name)
        return restored.manifest, attached.progress

    def _switch(self, attached: Attached) -> None:
        """Restore modes such as frozen parameters, unless the script deliberately begins with others."""
        if attached.modes is None or attached.modes == ModuleModes.of(self._modules, self._registered):
            return
        if attached.began == self._began:
            attached.modes.put(self._modules, self._registered)
        else:
            logger.warning(
                "the script begins with other parameters frozen, other modules in eval(), or other groups of its optimizers than"
                " the job of the checkpoint did: they stay as the script has them"
            )


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


def begin_from(
    resume: str | None, rollback: Rollback | None, ledger: Ledger, again: Restoration | None = None, start_step: int = 0
) -> None:
    """Begin from a checkpoint if requested, with all workers, before the first step; refuse impossible requests.

    ``again``: the job restarted by itself. A script whose ``start_step`` is later than any checkpoint continues from the state it
    has loaded itself. Raises GroupError if a worker is lost meanwhile.
    """
    if again is not None:
        _begin_again(resume, rollback, ledger, again)
        return
    if rollback is None:
        if resume is not None:
            raise Refused("--resume: from where? Say where checkpoints are: --checkpoints URL, or job.checkpoints(url)")
        return
    if ledger.rewinds:
        # Done, before a worker was lost.
        return
    rollback.check_writable()
    try:
        if resume is None:
            rollback.check_fresh()
            rollback.claim()
            return
        wanted = rollback.named = None if resume == "auto" else int(resume)
        problem = rollback.prepare(wanted, next_branch=False, at_least=start_step)
        if problem is None:
            if start_step:
                logger.info("--resume: a checkpoint goes before job.steps(start_step=%d)", start_step)
            rollback.claim()
            rollback.go()
            return
        listed = rollback.listed()
    except SnapshotError as error:
        raise Refused(f"checkpoints in {rollback.url} cannot be read: {error}") from error
    if wanted is not None:
        steps = ", ".join(str(each.step) for each in listed) or "none"
        raise Refused(f"--resume {wanted}: {problem}; there are: {steps}")
    if start_step and not rollback.rejected and all(each.step < start_step for each in listed):
        logger.info(
            "--resume: no checkpoint is of step %d or later: the job goes on from there, with what the script has loaded",
            start_step,
        )
        rollback.claim()
        return
    if listed or rollback.rejected:
        # A new beginning would discard data that can perhaps be repaired.
        raise Refused(
            f"--resume: {problem}: repair or remove what is there, or start without --resume in another place"
        )
    rollback.claim()
    rollback.warn_of_rests()


def _begin_again(resume: str | None, rollback: Rollback | None, ledger: Ledger, again: Restoration) -> None:
    """Begin from the newest checkpoint of the job's history; anew only where that was decided.

    Raises SnapshotMissing if no checkpoint is usable: a fault, since there was one.
    """
    if rollback is None or ledger.rewinds:
        return
    rollback.named = int(resume) if resume is not None and resume != "auto" else None
    # A separate branch that has no checkpoint yet begins where it began.
    wanted = rollback.named if again.checkpoint is None else None
    problem = rollback.prepare(wanted, next_branch=False, again=again)
    if problem is not None and (again.checkpoint is not None or rollback.rejected):
        raise SnapshotMissing(f"the job cannot begin again: {problem}")
    if again.checkpoint is None:
        # The workers that began before may not have come to this.
        rollback.claim()
    if problem is None:
        rollback.go()
