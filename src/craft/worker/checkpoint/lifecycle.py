"""The checkpoints of one loop: begin from one, take them, and roll back.

Input: every committed step and step boundary. Output: checkpoints taken, or this worker's state replaced by a checkpoint's.
``TrainingLoop`` calls it, on the main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from craft.decide.techniques import Checkpoints, Divergence
from craft.decide.techniques.technique import Hooks
from craft.protocol.errors import BitsDiffer, GroupError, LeftBehind, Refused
from craft.protocol.events import AnyNote, CheckpointRestored, RolledBack, ScriptWarned, StartStepTaken
from craft.protocol.membership import Generation
from craft.protocol.values.activity import Phase
from craft.snapshots.checkpoint.sharded.reshard import Target
from craft.snapshots.state.leaves import STATE_IS_BUILT, Leaf
from craft.snapshots.state.serialized import State
from craft.worker.checkpoint.candidates import RollbackCandidates
from craft.worker.checkpoint.due import with_members
from craft.worker.checkpoint.earlier_results import EarlierResults
from craft.worker.checkpoint.resume import Resume, forgotten_start_step
from craft.worker.checkpoint.rollback import Rollback
from craft.worker.checkpoint.scheduler import CheckpointScheduler
from craft.worker.checkpoint.store_claim import StoreClaim
from craft.worker.monitor.consistency import AgreedStep
from craft.worker.monitor.nonfinite import NonFiniteGuard
from craft.worker.reduce.word_parts import CheckpointPart
from craft.worker.report.reporter import paused
from craft.worker.state.loop_context import LoopContext
from craft.worker.state.metadata import Attached, ModuleModes, TrainingProgress

logger = logging.getLogger(__name__)


class CheckpointLifecycle:
    """Begins from, takes and returns to checkpoints. Owned by the main thread."""

    def __init__(self, parts: LoopContext, agreement: AgreedStep, leaves: Callable[[], list[Leaf]]) -> None:
        """``leaves`` returns the current training state."""
        self._agreement = agreement
        self.applied = 0
        """The step that the script is in; on a joiner that is catching up, behind that of the others."""
        self.stop_reason: str | None = None
        """Why the script asked the job to stop after the next step; None: it did not, or that step is committed."""
        self.stop_is_final = True
        """Whether a job that resumes after that step trains no further."""
        self.stopped_by: str | None = None
        """Why the script ended the loop with the last committed step; None: it did not."""
        self.spoiled = False
        """Whether the state is no longer that of the end of the loop."""
        self.saved = False
        """Whether a checkpoint was taken at the last step boundary."""
        divergence = parts.techniques.get(Divergence)
        self.numbers = NonFiniteGuard(
            divergence.settings.answer if divergence is not None else None,
            parts.registered.values(),
            self._announce,
            divergence.settings.spikes if divergence is not None else None,
            is_sharded=parts.link is not None,
        )
        self.scheduler: CheckpointScheduler | None = None
        self._rollback: Rollback | None = None
        self._resume: Resume | None = None
        self._settings = parts.settings
        self._participant = parts.participant
        self._membership = parts.membership
        self._reporter = parts.reporter
        self._activity = parts.activity
        self._modules = parts.modules
        self._began = ModuleModes.of(parts.modules, parts.registered)
        self._registered = parts.registered
        self._conditions = parts.conditions
        self._source = parts.source
        self._earlier = EarlierResults(parts, leaves)
        self._prepared_for = 0
        """The generation for whose checkpoint shares memory is prepared."""
        if (target := parts.target) is not None:
            self.scheduler = CheckpointScheduler(
                target,
                parts.settings.worker_id,
                parts.membership,
                parts.reporter,
                parts.activity,
                self.state,
                parts.source.ends_epoch,
            )
            self._rollback = Rollback(
                target.tiers,
                RollbackCandidates(target.tiers, parts.participant, parts.reporter),
                parts.participant,
                Target(parts.modules, parts.registered, parts.settings.position, parts.settings.replica_size),
                self.attached,
            )
            store = StoreClaim(target.tiers, parts.participant, parts.reporter)
            self._resume = Resume(parts.participant, self._rollback, store, parts.settings.resume)

    @property
    def attached(self) -> Attached:
        """Metadata that travels with the state."""
        ledger = self._participant.ledger
        progress = TrainingProgress(
            self._source.skipped,
            self.numbers.lowered_until,
            ledger.loop,
            ledger.first_step,
            self.spoiled,
            recent=self.numbers.recent,
            stop=self.stop_reason,
            stop_is_final=self.stop_is_final,
            position=self._source.position(self.applied),
            stopped_by=self.stopped_by,
        )
        return Attached(self._conditions, progress, self._began, ModuleModes.of(self._modules, self._registered))

    def state(self) -> State:
        """Return the whole current state, with its metadata."""
        return State(self._modules, self._registered, msgspec.json.encode(self.attached))

    def take(self, progress: TrainingProgress) -> None:
        """Apply the progress that came with a state from other workers or a checkpoint."""
        self._source.skip(progress.skipped)
        if progress.position is not None:
            self._source.seek(progress.position)
        self.numbers.load(progress)
        if progress.stop is not None:
            self.ask_to_stop(progress.stop, progress.stop_is_final)
        self.stopped_by = progress.stopped_by

    def ask_to_stop(self, reason: str, is_final: bool) -> None:
        """End the loop with the next step that is committed; ``is_final``: also that of a job that resumes after it."""
        self.stop_reason, self.stop_is_final = reason, is_final

    def stopped(self, reason: str, is_final: bool) -> None:
        """Record that the loop ends with the last committed step; ``is_final``: by its script, so that a resumed job ends too."""
        self.stop_reason, self.stopped_by = None, reason if is_final else None

    # Beginning and rollback.

    def begin(self) -> None:
        """Begin from a checkpoint, if requested, before the first step. Raises GroupError if a worker is lost."""
        if self._participant.loops > 1:
            # The job is running: its first loop began from a checkpoint, if any.
            return
        restoration = self._membership.restoration
        if self._resume is not None:
            with paused(self._activity, self._reporter, "reading a checkpoint"):
                self._resume.begin(restoration)
        elif restoration is None and self._settings.resume is not None:
            raise Refused("--resume: from where? Say where checkpoints are: --checkpoints URL, or job.checkpoints(url)")
        ledger = self._participant.ledger
        if ledger.rewinds or ledger.loop > 1:
            return
        if start_step := self._participant.start_step:
            self._agreement.begin(start_step)
            self._reporter.note(StartStepTaken(step=start_step, branch=ledger.branch))
        elif (warning := forgotten_start_step(self._registered)) is not None:
            self._warn(warning)

    def follow(self) -> bool:
        """Load the checkpoint that all workers rolled back to, if any; return whether they did."""
        if self._rollback is None or self.scheduler is None or (found := self._rollback.follow()) is None:
            return False
        restored, progress = found
        manifest = restored.manifest
        left_at, self.applied = self.applied, manifest.step
        self._agreement.begin(manifest.step)
        if restored.resharded:
            self._warn(
                f"checkpoint {manifest.name} was saved by replicas of {manifest.num_positions} workers with another mesh: the job"
                " goes on from the same state, and not with the same bits"
            )
        elif not left_at:
            self._earlier.restored(manifest.branch, manifest.step)
        event: AnyNote = CheckpointRestored(
            name=manifest.name,
            branch=self._participant.ledger.branch,
            step=manifest.step,
            url=self._rollback.candidates.url,
        )
        if left_at:
            self._earlier.rolled_back()
            # The data since is skipped: the next step takes the data that would have come now.
            progress = replace(progress, skipped=left_at - manifest.step + self._source.skipped)
            reason = self.numbers.due.what if self.numbers.due is not None else ""
            branch, skipped = self._participant.ledger.branch, progress.skipped
            event = RolledBack(branch=branch, step=manifest.step, left_at=left_at, skipped=skipped, reason=reason)
            self.numbers.went_back(manifest.step)
        self._announce(event)
        self.take(progress)
        if self.stopped_by is not None:
            self._resume_stopped(manifest.step, self._rollback.candidates.named == manifest.step)
        self.scheduler.went_back(self._participant.ledger.branch, manifest.step)
        return True

    def _resume_stopped(self, step: int, named: bool) -> None:
        """End the loop where the script had ended it, unless the user ``named`` this step to go on from."""
        assert self.stopped_by is not None
        if named:
            self.stopped_by = None
            return
        self._warn(
            f"the script stopped this job after {step} steps ({self.stopped_by}): --resume trains no further;"
            f" --resume {step} goes on past that stop"
        )

    def _warn(self, text: str) -> None:
        # Noted events appear on the terminal already.
        logger.log(logging.INFO if self._reporter.is_heard else logging.WARNING, "%s", text)
        self._reporter.note(ScriptWarned(text=text))

    def compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise BitsDiffer if ``step`` gave other metrics before the job restarted."""
        try:
            self._earlier.check_metrics(step, metrics)
        except BitsDiffer as error:
            self.differs(error, step)
            raise

    def _compare_state(self) -> None:
        """Raise BitsDiffer if the state differs from an earlier one after the same number of steps.

        It is a warning where the difference may be intended: the script was changed, or a single worker keeps values that differ,
        such as times.
        """
        ledger = self._participant.ledger
        if (wrong := self._earlier.check_state(self.applied, ledger)) is None:
            return
        if not self._earlier.same_script or len(ledger.members) == 1:
            self._warn(wrong)
            return
        error = BitsDiffer(wrong)
        self.differs(error, self.applied)
        raise error

    def differs(self, error: BitsDiffer, step: int) -> None:
        """Report that the result cannot be trusted, which ends the job; the caller raises ``error`` next."""
        if self._rollback is not None:
            # Before the report, which ends the job.
            with self._activity.paused("marking checkpoints that may hold wrong bits"):
                self._rollback.candidates.doubt(self._agreement.step, step, str(error))
        self._reporter.diverged(error, step, self._participant.ledger.members)

    def _go_back(self, regroup: Callable[[], None]) -> None:
        """Roll back to the newest checkpoint, with all workers, after a divergence."""
        assert self._rollback is not None
        self._activity.now(Phase.EXCHANGING, self.applied)
        before = self._participant.ledger.rewinds
        while self._participant.ledger.rewinds == before:
            try:
                with paused(self._activity, self._reporter, "going back to a checkpoint"):
                    problem = self._rollback.prepare(None, next_branch=True)
                if problem is not None:
                    assert self.numbers.due is not None
                    answer = f"the step changes nothing, instead of going back: {problem}"
                    self._reporter.note(replace(self.numbers.due, answer=answer))
                    return
                self._participant.go_back()
            except GroupError as error:
                self._participant.broke(error)
                self._participant.await_move()
                regroup()

    # Between steps.

    def word_part(self, step: int) -> CheckpointPart:
        """What it adds to this worker's word of ``step``."""
        if self.scheduler is None:
            return CheckpointPart()
        return self.scheduler.word_part(step, self._participant.ledger.rank == 0)

    @property
    def hooks(self) -> dict[str, Hooks]:
        """Hooks of the techniques that take part."""
        own: dict[str, Hooks] = {Divergence.name: self.numbers}
        return own if self.scheduler is None else {**own, Checkpoints.name: self.scheduler}

    def _announce(self, event: AnyNote) -> None:
        """Tell the lighthouse and the script's handlers."""
        self._reporter.note(event)
        self._reporter.emit(event)

    def prepare(self, step: int, under: Generation) -> None:
        """Prepare memory for the current members' shares after ``step`` was committed under a generation."""
        if self.scheduler is None or step < STATE_IS_BUILT or self._prepared_for == under.number:
            return
        if self.scheduler.prepare(under, self._keeping_pace):
            self._prepared_for = under.number

    @property
    def _keeping_pace(self) -> tuple[str, ...]:
        ledger = self._participant.ledger
        return tuple(each for each in ledger.members if each not in ledger.idle)

    def at_boundary(self, behind: bool, regroup: Callable[[], None]) -> None:
        """Roll back if needed and take a checkpoint if one is due, after a step. Raises Left if all leave.

        ``regroup`` enters the newest generation, and rolls back if its members have.
        """
        if self.numbers.goes_back and behind:
            raise LeftBehind("the job goes back to a checkpoint while this worker catches up: another one will come")
        if self.numbers.goes_back:
            self._go_back(regroup)
            self.follow()
            self.numbers.due = None
        if not behind:
            self._compare_state()
        self.saved = self.scheduler is not None and self.scheduler.at_boundary()
        if self.saved:
            self._earlier.saved(self._participant.ledger.branch, self.applied)

    def checkpoint(self, tag: str | None, everyone: Callable[[bytes], list[bytes]]) -> None:
        """Take a checkpoint of the current state; ``everyone`` gathers the bytes of all current members."""
        ledger, generation = self._participant.ledger, self._participant.generation
        assert self.scheduler is not None and generation is not None
        parts = everyone(msgspec.json.encode((ledger.worker_id, generation)))
        found = [msgspec.json.decode(data, type=tuple[str, Generation]) for data in parts]
        members = tuple(worker_id for worker_id, _ in found)
        if ledger.worker_id in members:
            # Use the first one's generation: a new one may have begun during the call.
            self.scheduler.ask(tag, self.applied, ledger.branch, with_members(found[0][1], found), members)

    # At the end of the loop.

    def end(self) -> None:
        """Write this worker's share of the last checkpoint, when all workers have committed every step."""
        generation = self._participant.generation
        if self.scheduler is None or generation is None:
            return
        if self._participant.ledger.worker_id in self._keeping_pace:
            self.scheduler.at_end(self.applied, self._participant.ledger.branch, generation, self._keeping_pace)

    def leave(self) -> None:
        """Finish writing this worker's shares before it leaves the job early."""
        if self.scheduler is not None:
            self.scheduler.finish()

    def close(self) -> None:
        self._earlier.close()
        if self.scheduler is not None:
            self.scheduler.close()
