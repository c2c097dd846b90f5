"""What outlives a lighthouse: the generations it gave out, who may never come back, and whether the job is over.

``Loop`` saves before it tells anybody; a lighthouse that starts on the same run directory restores from it.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
from craft.settings.rundir import sync_folder, write_over

logger = logging.getLogger(__name__)

_KEPT_GONE = 256
_ROOM = 16 * 1024


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
    leave_by: tuple[tuple[str, float], ...] = ()
    """Those of them that count as lost from a certain time on, in seconds since 1970."""
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
    """One small file, replaced as a whole.

    Two files take turns: what is saved is written over the one before the last, and then gets the name. So the room for it is
    there already: a disk that others filled does not keep a job from going on without a lost worker, or from ending.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = path.with_name(f".{path.name}.next")
        self._last = path.with_name(f".{path.name}.last")

    def save(self, durable: Durable) -> None:
        data = msgspec.json.encode(durable)
        write_over(self._next, data.ljust(self._room_for(len(data))) + b"\n")
        # A second name for what is replaced: its room is not given back, and is that of the next one.
        self._last.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            # Not there yet, or a file system without hard links.
            os.link(self._path, self._last)
        os.replace(self._next, self._path)
        sync_folder(self._path)
        try:
            if self._last.exists():
                os.replace(self._last, self._next)
            else:
                write_over(self._next, b" " * self._path.stat().st_size)
        except OSError as error:
            # It is saved all the same.
            logger.warning("there is no room yet to make the next generation durable: %s", error)

    def _room_for(self, size: int) -> int:
        """As many bytes as are there, if they are enough; else enough for a while."""
        try:
            there = self._next.stat().st_size - 1
        except FileNotFoundError:
            there = _ROOM
        return there if there >= size else 2 * size

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
        leave_by=tuple(
            (view.member.worker_id, view.leave_by)
            for view in state.having("waiting", "member")
            if view.leave_by is not None
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
    leaving, leave_by = dict(durable.draining), dict(durable.leave_by)

    def reminded(view: WorkerView) -> WorkerView:
        worker_id = view.member.worker_id
        return replace(view, draining=leaving.get(worker_id), leave_by=leave_by.get(worker_id))

    return replace(
        state,
        workers=(
            *map(reminded, living),
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
