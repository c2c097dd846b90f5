"""Look-ups in the job's state that are made for every report, several times a second and host: they must not search."""

from __future__ import annotations

from collections.abc import Callable

from craft.decide.membership import JobState, WorkerView


class Index:
    """Workers by id and living ones by host; made anew only when the state's workers are others than before."""

    def __init__(self, state: Callable[[], JobState]) -> None:
        self._state = state
        self._workers: tuple[WorkerView, ...] | None = None
        self._views: dict[str, WorkerView] = {}
        self._living: dict[str, frozenset[str]] = {}

    @property
    def current(self) -> int | None:
        """The number of the current generation."""
        generation = self._state().generation
        return None if generation is None else generation.number

    def view(self, worker_id: str) -> WorkerView | None:
        self._refresh()
        return self._views.get(worker_id)

    def lives(self, worker_id: str) -> bool:
        view = self.view(worker_id)
        return view is not None and view.standing in ("waiting", "member")

    def gone(self, worker_id: str) -> bool:
        """Whether it is known and neither waits nor takes part; False for one that nobody has heard of."""
        view = self.view(worker_id)
        return view is not None and view.standing in ("lost", "finished")

    def living(self, host: str) -> frozenset[str]:
        """Workers of ``host`` that wait or take part."""
        self._refresh()
        return self._living.get(host, frozenset())

    def _refresh(self) -> None:
        workers = self._state().workers
        if workers is self._workers:
            return
        self._workers = workers
        self._views = {view.member.worker_id: view for view in workers}
        living: dict[str, set[str]] = {}
        for view in workers:
            if view.standing in ("waiting", "member"):
                living.setdefault(view.member.host, set()).add(view.member.worker_id)
        self._living = {host: frozenset(worker_ids) for host, worker_ids in living.items()}
