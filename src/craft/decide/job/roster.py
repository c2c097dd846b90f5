"""The tuple of all workers of a job, with an index: look-ups by id and by standing without a search.

``JobState`` looks workers up for every event, and a job of thousands of workers has as many events within moments.
``with_view`` and ``with_appended`` hand the index on to the new roster; the old one builds its index again if asked.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from craft.protocol.membership import Generation, Member

Standing = Literal["waiting", "member", "lost", "left", "finished"]
"""``waiting``: a spare, without a slot; ``left``: drained, went at a step boundary."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the lighthouse knows it. A lost worker stays lost: its replacement has another id."""

    member: Member
    standing: Standing = "waiting"
    entered: int = 0
    """The newest generation that it reported to have entered."""
    fresh: bool = False
    """Whether this lighthouse saw it join: only then ``entered`` is complete."""
    draining: str | None = None
    """Why it is to leave, if it is."""
    leave_by: float | None = None
    """When it counts as lost if it has not left, in seconds since 1970."""
    behind: bool = False
    """Whether it is still catching up: it may have no training state."""
    ended: bool = False
    """Whether its process is known to have ended."""
    digest: str | None = None
    """Digest of its whole state after the last step of the job, once it has finished."""
    cut: tuple[int, int] | None = None
    """(committed, planned) steps of its last loop, if it finished with fewer than planned."""
    after_loop: bool = False
    """Whether its training loop is over and its script still runs."""
    script_ended: bool = False
    """Whether its script ran to its end."""


class Roster(tuple[WorkerView, ...]):
    """All workers, in the order in which they were first seen. A value like any tuple; the index only saves time."""

    _index: _Index | None = None

    def find(self, worker_id: str) -> WorkerView | None:
        """Return the worker of that id."""
        position = self._indexed().positions.get(worker_id)
        return None if position is None else self[position]

    def having(self, standings: tuple[Standing, ...]) -> tuple[WorkerView, ...]:
        """Return the workers of these standings, in their order."""
        index = self._indexed()
        groups = [group for standing in standings if (group := index.group(self, standing))]
        if len(groups) > 1:
            return tuple(view for view in self if view.standing in standings)
        return tuple(groups[0].values()) if groups else ()

    def has_leaving_members(self) -> bool:
        """Return whether any member is draining."""
        index = self._indexed()
        if index.leaving is None:
            index.leaving = any(view.draining is not None for view in self if view.standing == "member")
        return index.leaving

    def present(self, generation: Generation) -> tuple[str, ...]:
        """Return the ids of the generation's members that still are members, in the order of their ranks."""
        index = self._indexed()
        if index.present is None or index.present[0] is not generation:
            inside = index.group(self, "member")
            found = tuple(member.worker_id for member in generation.members if member.worker_id in inside)
            index.present = (generation, found)
        return index.present[1]

    def with_view(self, view: WorkerView) -> Roster:
        """Return the roster with ``view`` in place of the one with its id; the same roster if the id is unknown."""
        index = self._indexed()
        position = index.positions.get(view.member.worker_id)
        if position is None:
            return self
        index.replace(self[position], view)
        return self._handed_on((*self[:position], view, *self[position + 1 :]), index)

    def with_appended(self, view: WorkerView) -> Roster:
        """Return the roster with another worker, whose id is new, at its end."""
        index = self._indexed()
        assert view.member.worker_id not in index.positions
        index.append(view, len(self))
        return self._handed_on((*self, view), index)

    def _indexed(self) -> _Index:
        if self._index is None:
            self._index = _Index(self)
        return self._index

    def _handed_on(self, workers: tuple[WorkerView, ...], index: _Index) -> Roster:
        """Return the roster of ``workers``, for which ``index`` was just changed: it is not this one's any more."""
        self._index = None
        roster = Roster(workers)
        roster._index = index
        return roster


class _Index:
    """What was worked out for one roster."""

    def __init__(self, workers: tuple[WorkerView, ...]) -> None:
        # Backwards, so that of two with one id the first is found.
        self.positions = {workers[at].member.worker_id: at for at in range(len(workers) - 1, -1, -1)}
        self.groups: dict[Standing, dict[str, WorkerView]] = {}
        self.leaving: bool | None = None
        self.present: tuple[Generation, tuple[str, ...]] | None = None

    def group(self, workers: tuple[WorkerView, ...], standing: Standing) -> dict[str, WorkerView]:
        """Return the workers of one standing by their ids, in their order."""
        if standing not in self.groups:
            self.groups[standing] = {view.member.worker_id: view for view in workers if view.standing == standing}
        return self.groups[standing]

    def replace(self, before: WorkerView, now: WorkerView) -> None:
        if before.standing == now.standing:
            if now.standing in self.groups:
                self.groups[now.standing][now.member.worker_id] = now
        else:
            self.leaving = self.present = None
            self.groups.get(before.standing, {}).pop(before.member.worker_id, None)
            # Its position in the new group is not known: the group is built again when it is asked for.
            self.groups.pop(now.standing, None)
        if before.draining != now.draining:
            self.leaving = None

    def append(self, view: WorkerView, position: int) -> None:
        self.positions[view.member.worker_id] = position
        self.leaving = self.present = None
        if view.standing in self.groups:
            self.groups[view.standing][view.member.worker_id] = view
