"""Look-ups in the tuple of all workers that do not walk through it: by id, by standing, and one worker replaced.

``JobState`` asks for every event, and a job of thousands of workers has as many events within moments. What was worked
out for the latest tuple is kept, and carried over to the next one if that differs in one worker, as it nearly always
does. Answers depend on the arguments alone: what is kept only saves time.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from craft.protocol.membership import Generation, Member


class View(Protocol):
    """What a worker in the tuple has to have."""

    @property
    def member(self) -> Member: ...

    @property
    def standing(self) -> str: ...

    @property
    def draining(self) -> str | None: ...


V = TypeVar("V", bound=View)


def find(workers: tuple[V, ...], worker_id: str) -> V | None:
    """Return the worker of that id."""
    position = _roster(workers).positions.get(worker_id)
    return None if position is None else workers[position]


def having(workers: tuple[V, ...], standings: tuple[str, ...]) -> tuple[V, ...]:
    """Return the workers of these standings, in their order."""
    groups = [group for standing in standings if (group := _roster(workers).group(standing))]
    if len(groups) > 1:
        return tuple(view for view in workers if view.standing in standings)
    # They are of the tuple's own kind, since they came out of it.
    return tuple(groups[0].values()) if groups else ()  # type: ignore[arg-type]


def leaving(workers: tuple[View, ...]) -> bool:
    """Whether any worker that takes part is to leave."""
    return _roster(workers).leaving()


def present(workers: tuple[View, ...], generation: Generation) -> tuple[str, ...]:
    """Return the ids of those members of a generation that still are members, in the order of their ranks."""
    return _roster(workers).present(generation)


def replaced(workers: tuple[V, ...], view: V) -> tuple[V, ...]:
    """Return the workers with ``view`` in the place of the one of its id; the same if there is none."""
    roster = _roster(workers)
    position = roster.positions.get(view.member.worker_id)
    if position is None:
        return workers
    changed = (*workers[:position], view, *workers[position + 1 :])
    # Most likely the next to be asked about; should it not be, the way back is found as any other.
    roster.change(position, changed)
    return changed


class _Roster:
    """What was worked out for one tuple of workers."""

    def __init__(self, workers: tuple[View, ...]) -> None:
        self.workers = workers
        # Backwards, so that of two with one id the first is found.
        self.positions = {workers[at].member.worker_id: at for at in range(len(workers) - 1, -1, -1)}
        self._groups: dict[str, dict[str, View]] = {}
        self._leaving: bool | None = None
        self._present: tuple[Generation, tuple[str, ...]] | None = None

    def group(self, standing: str) -> dict[str, View]:
        """The workers of one standing by their ids, in their order."""
        if standing not in self._groups:
            self._groups[standing] = {view.member.worker_id: view for view in self.workers if view.standing == standing}
        return self._groups[standing]

    def leaving(self) -> bool:
        if self._leaving is None:
            self._leaving = any(view.draining is not None for view in self.workers if view.standing == "member")
        return self._leaving

    def present(self, generation: Generation) -> tuple[str, ...]:
        if self._present is None or self._present[0] is not generation:
            inside = self.group("member")
            found = tuple(member.worker_id for member in generation.members if member.worker_id in inside)
            self._present = (generation, found)
        return self._present[1]

    def follow(self, workers: tuple[View, ...]) -> bool:
        """Become the roster of ``workers``, if that is this one's but for one worker; else stay as it is."""
        if len(workers) == len(self.workers) + 1:
            return self._appended(workers)
        if len(workers) != len(self.workers) or not workers:
            return False
        at = _first_difference(self.workers, workers)
        if self.workers[at].member.worker_id != workers[at].member.worker_id:
            return False
        if self.workers[at + 1 :] != workers[at + 1 :]:
            return False
        self.change(at, workers)
        return True

    def change(self, at: int, workers: tuple[View, ...]) -> None:
        """Become the roster of ``workers``, where only the one in this place is another, of the same id."""
        before, now = self.workers[at], workers[at]
        if before.standing == now.standing:
            if now.standing in self._groups:
                self._groups[now.standing][now.member.worker_id] = now
        else:
            self._leaving = self._present = None
            self._groups.get(before.standing, {}).pop(before.member.worker_id, None)
            # Where in its new group it belongs is found when somebody asks.
            self._groups.pop(now.standing, None)
        if before.draining != now.draining:
            self._leaving = None
        self.workers = workers

    def _appended(self, workers: tuple[View, ...]) -> bool:
        new = workers[-1]
        if new.member.worker_id in self.positions or workers[:-1] != self.workers:
            return False
        self.positions[new.member.worker_id] = len(self.workers)
        self._leaving = self._present = None
        if new.standing in self._groups:
            self._groups[new.standing][new.member.worker_id] = new
        self.workers = workers
        return True


def _first_difference(old: tuple[View, ...], new: tuple[View, ...]) -> int:
    """Where two tuples of one length begin to differ; the last position if they do not. Halves are compared whole."""
    low, high = 0, len(old)
    while high - low > 1:
        middle = (low + high) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle
    return low


_latest = [_Roster(())]


def _roster(workers: tuple[View, ...]) -> _Roster:
    latest = _latest[0]
    if latest.workers is not workers and not latest.follow(workers):
        latest = _latest[0] = _Roster(workers)
    return latest
