"""The course of a job through its history: where it begins, what is kept of it, and when it goes back.

Enters: every committed step, and every step boundary. Leaves: checkpoints taken, or the state of one of them in the place of
this worker's own. ``Training`` calls it, on the main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from craft.decide.technique import Hooks
from craft.decide.techniques import Checkpoints, Divergence
from craft.protocol.activity import Phase
from craft.protocol.errors import GroupError, LeftBehind
from craft.protocol.events import AnyNote, CheckpointRestored, NumbersDiverged, RolledBack
from craft.protocol.membership import Generation
from craft.snapshots.manifest import Manifest
from craft.snapshots.portable import State
from craft.worker.gather import gather
from craft.worker.modes import Modes
from craft.worker.numbers import Numbers
from craft.worker.parts import Parts
from craft.worker.rewind import Rewind, begin_from
from craft.worker.saving import Saving
from craft.worker.start import Attached, Progress

STATE_IS_BUILT = 2
"""By this step optimizers have made their state: it, and what a joiner will get, is as large as it is going to be."""


class Course:
    """Owned by the main thread."""

    def __init__(self, parts: Parts) -> None:
        self.applied = 0
        """The step that the script is in: for a joiner that catches up, behind that of the others."""
        divergence = parts.techniques.get(Divergence)
        self.numbers = Numbers(
            divergence.settings.answer if divergence is not None else None, parts.registered.values(), self._diverged
        )
        self.saving: Saving | None = None
        self._rewind: Rewind | None = None
        self._settings = parts.settings
        self._commitments = parts.commitments
        self._meeting = parts.meeting
        self._voice = parts.voice
        self._activity = parts.activity
        self._modules = parts.modules
        self._began = Modes.of(parts.modules, parts.registered)
        self._registered = parts.registered
        self._conditions = parts.conditions
        self._source = parts.source
        self._prepared_for = 0
        """The generation for whose shares of checkpoints there is room."""
        if (target := parts.target) is not None:
            self.saving = Saving(
                target, parts.settings.worker_id, parts.meeting, parts.voice, parts.activity, self.state
            )
            self._rewind = Rewind(
                target.tiers, parts.commitments, parts.voice, parts.modules, parts.registered, self.attached
            )

    @property
    def attached(self) -> Attached:
        """What travels beside the state."""
        progress = Progress(self._source.skipped, self.numbers.lowered_until)
        return Attached(self._conditions, progress, self._began, Modes.of(self._modules, self._registered))

    def state(self) -> State:
        """The whole state as it is now, with what travels beside it."""
        return State(self._modules, self._registered, msgspec.json.encode(self.attached))

    def take(self, progress: Progress) -> None:
        """The state is another job's, or that of an earlier time, and this was beside it."""
        self._source.skip(progress.skipped)
        self.numbers.load(progress)

    # Where it begins, and goes back to.

    def begin(self) -> None:
        """Before the first step: begin from a checkpoint, if that is wanted. Raises GroupError if somebody is lost."""
        with self._activity.paused("reading a checkpoint"):
            begin_from(self._settings.resume, self._rewind, self._commitments.ledger, self._meeting.restoration)

    def follow(self) -> bool:
        """If all went back to a checkpoint, do so here, too; whether it was so."""
        if self._rewind is None or self.saving is None or (found := self._rewind.follow()) is None:
            return False
        manifest, progress = found
        left_at, self.applied = self.applied, manifest.step
        event: AnyNote = CheckpointRestored(
            name=manifest.name, branch=self._commitments.ledger.branch, step=manifest.step, url=self._rewind.url
        )
        if left_at:
            # The data since is left out: the next step takes what would have come now.
            progress = replace(progress, skipped=left_at - manifest.step + self._source.skipped)
            event = self._rolled_back(manifest, left_at, progress.skipped)
            self.numbers.went_back(manifest.step)
        self._voice.note(event)
        self._voice.emit(event)
        self.take(progress)
        self.saving.went_back(self._commitments.ledger.branch, manifest.step)
        return True

    def _rolled_back(self, manifest: Manifest, left_at: int, skipped: int) -> RolledBack:
        reason = self.numbers.due.what if self.numbers.due is not None else ""
        branch = self._commitments.ledger.branch
        return RolledBack(branch=branch, step=manifest.step, left_at=left_at, skipped=skipped, reason=reason)

    def _go_back(self, regroup: Callable[[], None]) -> None:
        """Numbers are not finite: go back to the newest checkpoint, with everybody."""
        assert self._rewind is not None
        self._activity.now(Phase.EXCHANGING, self.applied)
        before = self._commitments.ledger.rewinds
        while self._commitments.ledger.rewinds == before:
            try:
                with self._activity.paused("going back to a checkpoint"):
                    problem = self._rewind.prepare(None, next_branch=True)
                if problem is not None:
                    assert self.numbers.due is not None
                    answer = f"the step changes nothing, instead of going back: {problem}"
                    self._voice.note(replace(self.numbers.due, answer=answer))
                    return
                self._rewind.go()
            except GroupError as error:
                self._commitments.broke(error)
                self._commitments.await_move()
                regroup()

    # Along its way.

    def word(self, step: int) -> dict[str, Any]:
        """What it adds to this worker's word of ``step``."""
        return self.saving.word(step, self._commitments.ledger.rank == 0) if self.saving is not None else {}

    @property
    def hooks(self) -> dict[str, Hooks]:
        """Of the techniques that have a part in it."""
        own: dict[str, Hooks] = {Divergence.name: self.numbers}
        return own if self.saving is None else {**own, Checkpoints.name: self.saving}

    def _diverged(self, event: NumbersDiverged) -> None:
        self._voice.note(event)
        self._voice.emit(event)

    def prepare(self, step: int, under: Generation) -> None:
        """``step`` was committed under a generation: there is to be room for the shares of those who keep pace."""
        if self.saving is None or step < STATE_IS_BUILT or self._prepared_for == under.number:
            return
        if self.saving.prepare(self._keeping_pace):
            self._prepared_for = under.number

    @property
    def _keeping_pace(self) -> tuple[str, ...]:
        ledger = self._commitments.ledger
        return tuple(each for each in ledger.members if each not in ledger.idle)

    def at_boundary(self, behind: bool, regroup: Callable[[], None]) -> None:
        """The script is done with a step: go back if need be, take a checkpoint if one is due. Raises Left if all leave.

        ``regroup`` enters the newest generation, and follows back if its members have gone back.
        """
        if self.numbers.goes_back and behind:
            raise LeftBehind("the job goes back to a checkpoint while this worker catches up: another one will come")
        if self.numbers.goes_back:
            self._go_back(regroup)
            self.follow()
            self.numbers.due = None
        if self.saving is not None:
            self.saving.at_boundary()

    def checkpoint(self, tag: str | None, everyone: Callable[[bytes], list[bytes]]) -> None:
        """Take a checkpoint of the state as it is now; ``everyone`` gathers the bytes of all who keep pace."""
        ledger, generation = self._commitments.ledger, self._commitments.generation
        assert self.saving is not None and generation is not None
        parts = everyone(msgspec.json.encode((ledger.worker_id, generation)))
        found = [msgspec.json.decode(data, type=tuple[str, Generation]) for data in parts]
        members = tuple(worker_id for worker_id, _ in found)
        if ledger.worker_id in members:
            # Under the first one's: a new generation may have come about in the middle of it.
            self.saving.ask(tag, self.applied, ledger.branch, found[0][1], members)

    # At its end.

    def end(self) -> None:
        """Every step is committed, and everybody is here: returns once the last checkpoint is written by all."""
        generation = self._commitments.generation
        if self.saving is None or generation is None:
            return
        if self._commitments.ledger.worker_id in self._keeping_pace:
            self.saving.at_end(self.applied, self._commitments.ledger.branch, generation, self._keeping_pace)
        gather(self._commitments.group, b"")

    def leave(self) -> None:
        """This worker leaves the job before its end: its share of what was taken is still written."""
        if self.saving is not None:
            self.saving.finish()

    def close(self) -> None:
        if self.saving is not None:
            self.saving.close()
