"""What outlives a lighthouse: the generations it gave out, who may never come back, and whether the job is over.

``Loop`` saves before it tells anybody; a lighthouse that starts on the same run directory restores from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from craft.decide.applying import restarted
from craft.decide.membership import JobState, WorkerView
from craft.protocol.actions import Stop
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import CheckpointWish, Preemption, Restoration
from craft.settings.rundir import write_private

_KEPT_GONE = 256


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the job's state that must not be forgotten."""

    generation: Generation | None = None
    upcoming: Generation | None = None
    """Told to its members, who may enter it while no lighthouse is there."""
    highest: int = 0
    lost: tuple[Member, ...] = ()
    """Workers that must not act any more; one of them may still be running somewhere."""
    gone: tuple[str, ...] = ()
    """Workers that ended or left: their agents may say so once more, and it is no news."""
    draining: tuple[tuple[str, str], ...] = ()
    """Workers that are to leave, and why."""
    winding_down: str | None = None
    preempting: Preemption | None = None
    wishes: tuple[CheckpointWish, ...] = ()
    restoration: Restoration | None = None
    former: Generation | None = None
    """Set while the job begins again: nobody acts under it any more."""
    replacing: bool = True
    stopping: Stop | None = None


class Store(Protocol):
    """Where a Durable is kept."""

    def save(self, durable: Durable) -> None:
        """Return only when ``durable`` would survive a crash."""


class DurableFile:
    """One small file, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, durable: Durable) -> None:
        write_private(self._path, msgspec.json.encode(durable))

    def load(self) -> Durable | None:
        """Return what was saved last, or None if nothing was."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Durable)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot go on with the run in {self._path.parent}: {self._path.name} is not readable ({error})."
                " Start a new run in another directory"
            ) from None


def durable_of(state: JobState) -> Durable:
    """Return what of ``state`` must be kept."""
    return Durable(
        generation=state.generation,
        upcoming=state.upcoming,
        highest=state.highest,
        lost=tuple(view.member for view in state.having("lost") if not view.ended),
        gone=tuple(
            view.member.worker_id for view in state.having("lost", "left") if view.ended or view.standing == "left"
        )[-_KEPT_GONE:],
        draining=tuple(
            (view.member.worker_id, view.draining)
            for view in state.having("waiting", "member")
            if view.draining is not None
        ),
        winding_down=state.winding_down,
        preempting=state.preempting,
        wishes=state.wishes,
        restoration=state.restoration,
        former=state.former,
        replacing=state.replacing,
        stopping=state.stopping,
    )


def restore(fresh: JobState, durable: Durable | None) -> JobState:
    """Return the state that a lighthouse begins with: ``fresh``, or what an earlier one left."""
    if durable is None:
        return fresh
    state = restarted(fresh, durable.generation)
    lost = {member.worker_id for member in durable.lost}
    known = [view for view in state.workers if view.member.worker_id not in lost]
    inside = {view.member.worker_id for view in known}
    joiners = durable.upcoming.members if durable.upcoming is not None else ()
    living = [*known, *(WorkerView(member=member) for member in joiners if member.worker_id not in inside | lost)]
    leaving = dict(durable.draining)
    return replace(
        state,
        workers=(
            *(replace(view, draining=leaving.get(view.member.worker_id)) for view in living),
            *(WorkerView(member=member, standing="lost") for member in durable.lost),
            *(
                WorkerView(member=Member(worker_id=worker_id), standing="lost", ended=True)
                for worker_id in durable.gone
                if worker_id not in inside
            ),
        ),
        upcoming=durable.upcoming,
        highest=max(state.highest, durable.highest),
        winding_down=durable.winding_down,
        preempting=durable.preempting,
        wishes=durable.wishes,
        restoration=durable.restoration,
        former=durable.former,
        replacing=durable.replacing,
        holding=durable.former.number if durable.former is not None else 0,
        branch=durable.restoration.branch if durable.restoration is not None else 0,
        # What those had committed who are gone since is not in the file.
        reached=None,
        stopping=durable.stopping,
    )
