"""Begin from a checkpoint or roll back to one, all workers together, each verifying every byte.

Input: the lists in the stores. Output: the state of this worker's objects, replaced. It follows the rule of the steps: a worker
that rolls back knows that all have read and verified the same checkpoint; if one is lost meanwhile, the members of the new
generation settle whether all roll back (``decide.step.settle``). Owned by the main thread.
"""

from __future__ import annotations

import logging
import time

import msgspec

from craft.decide.techniques import Divergence, Stragglers
from craft.protocol.errors import Refused, SnapshotCorrupt, SnapshotError, SnapshotMissing
from craft.protocol.messages import Restoration
from craft.snapshots.checkpoint.restore import Restored
from craft.snapshots.checkpoint.sharded.reshard import Target, restore_into
from craft.snapshots.state.serialized import load
from craft.snapshots.store.tiers import Tiers
from craft.telemetry.fault_points import reach
from craft.worker.checkpoint.candidates import Offer, RollbackCandidates
from craft.worker.membership.ft_calls import exchange
from craft.worker.membership.participant import Participant
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


class Rollback:
    """Chooses, verifies and loads a checkpoint on one worker."""

    def __init__(
        self,
        tiers: Tiers,
        candidates: RollbackCandidates,
        participant: Participant,
        target: Target,
        attached: Attached,
    ) -> None:
        """``attached``: the metadata of the state when the loop begins."""
        self.candidates = candidates
        self._tiers = tiers
        self._participant = participant
        self._target = target
        self._modules = target.modules
        self._registered = target.registered
        self._conditions = attached.conditions
        self._began = attached.began
        self._in_hand: Restored | None = None
        self._loaded = 0
        """How often a checkpoint was loaded into the state here."""

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
        offer = self.candidates.offer(wanted, next_branch, again, at_least) if leads else Offer()
        offer = msgspec.json.decode(exchange(self._participant, msgspec.json.encode(offer))[0], type=Offer)
        if offer.problem:
            return offer.problem
        reasons, url = [], self.candidates.url
        for name, branch in offer.names:
            problem = self._read(name, branch, next_branch)
            # Each member says why it cannot use it; nothing if it can.
            answers = exchange(self._participant, problem.encode())
            problem = next((each.decode() for each in answers if each), "")
            if not problem:
                reach("verified", self._participant.step)
                return None
            self._discard()
            reasons.append(f"{name}: {problem}")
            if leads:
                self.candidates.reject_offered(name, problem)
        if reasons:
            return f"none of the {len(reasons)} checkpoints in {url} can be used ({'; '.join(reasons)})"
        return f"there is no checkpoint{'' if wanted is None else f' of step {wanted}'} in {url}"

    def _discard(self) -> None:
        """Discard the checkpoint that was read: no worker rolled back to it, and it must not look usable."""
        self._participant.discard_checkpoint()
        self._in_hand = None

    def _read(self, name: str, branch: int, next_branch: bool) -> str:
        """Read and verify a checkpoint and keep it; return why it cannot be used, or ""."""
        # Not yet into the modules of a running job: perhaps no worker rolls back.
        in_place = not next_branch
        for wait_s in _AWAY_S:
            try:
                manifest = self.candidates.find(name)
                if manifest is None:
                    return f"worker {self._participant.ledger.worker_id} does not find it"
                restored = restore_into(self._tiers, manifest, self._target, in_place=in_place)
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

    def follow(self) -> tuple[Restored, TrainingProgress] | None:
        """Load the checkpoint into this worker's objects, if it rolled back, directly or by a settlement."""
        if self._participant.ledger.rewinds == self._loaded or self._in_hand is None:
            return None
        restored, self._in_hand = self._in_hand, None
        self._loaded = self._participant.ledger.rewinds
        attached = msgspec.json.decode(restored.header.conditions, type=Attached)
        self._switch(attached)
        load(restored.header, restored.tensors, self._modules, self._registered)
        logger.info("took the state of checkpoint %s", restored.manifest.name)
        return restored, attached.progress

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
