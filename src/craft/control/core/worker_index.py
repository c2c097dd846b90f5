"""Fast look-ups in the job state, which are made for every report several times a second."""

from __future__ import annotations

from collections.abc import Callable

from craft.decide.job.state import GONE, JobState, WorkerView


class WorkerIndex:
    """Workers by id and living ones by host."""

    def __init__(self, state: Callable[[], JobState]) -> None:
        self._state = state
        self._workers: tuple[WorkerView, ...] = ()
        self._by_host: dict[str, list[str]] = {}
        """All workers of a host that are or were in the state."""

    @property
    def wanted(self) -> frozenset[int]:
        """The numbers of the current and of the upcoming generation."""
        state = self._state()
        return frozenset(each.number for each in (state.generation, state.upcoming) if each is not None)

    def view(self, worker_id: str) -> WorkerView | None:
        return self._state().view(worker_id)

    def _standing(self, worker_id: str) -> str:
        view = self.view(worker_id)
        return "" if view is None else view.standing

    def lives(self, worker_id: str) -> bool:
        return self._standing(worker_id) in ("waiting", "member")

    def takes_part(self, worker_id: str) -> bool:
        return self._standing(worker_id) == "member"

    def gone(self, worker_id: str) -> bool:
        """Return whether it is known and neither waits nor is a member."""
        return self._standing(worker_id) in GONE

    def is_old_news(self, worker_id: str) -> bool:
        """Return whether an earlier lighthouse already knew that it is gone."""
        return self._standing(worker_id) == "lost"

    def may_run(self, worker_id: str) -> bool:
        """Return whether it is lost, but its process may still run."""
        view = self.view(worker_id)
        return view is not None and view.standing == "lost" and not view.ended

    def is_behind(self, worker_id: str) -> bool:
        """Return whether it joined and is still catching up."""
        view = self.view(worker_id)
        return view is not None and view.behind

    @property
    def all_leave(self) -> bool:
        """Whether the job has begun and cannot go on with the live workers that are not draining."""
        state = self._state()
        return state.generation is not None and not state.can_compute((*state.staying, *state.fitting(state.staying)))

    def staying(self, host: str) -> bool:
        """Return whether a live worker of ``host`` is not draining yet."""
        views = (self.view(worker_id) for worker_id in self.living(host))
        return any(view is not None and view.draining is None for view in views)

    def living(self, host: str) -> frozenset[str]:
        """Return the live workers of ``host``."""
        self._refresh()
        return frozenset(worker_id for worker_id in self._by_host.get(host, ()) if self.lives(worker_id))

    def _refresh(self) -> None:
        """Index new workers. They are appended; the state rarely forgets those that are gone."""
        workers = self._state().workers
        if workers is self._workers:
            return
        known = len(self._workers)
        if len(workers) < known or (known and workers[known - 1].member != self._workers[-1].member):
            known, self._by_host = 0, {}
        for view in workers[known:]:
            self._by_host.setdefault(view.member.host, []).append(view.member.worker_id)
        self._workers = workers
