"""Where the members of a generation meet: takes directives, aborts the old group at once, opens the new one behind the scenes.

Called by the channel's thread (``direct``) and by the main thread (``current``, ``newer``, ``enter``). A group opens on a
thread of its own, which is left behind if a newer generation comes first: opening may hang when a member dies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from craft.groups.gloo import GlooGroup
from craft.protocol.errors import Fenced, GroupError
from craft.protocol.membership import Generation
from craft.protocol.messages import Directive
from craft.worker.points import reach

logger = logging.getLogger(__name__)

OnBroken = Callable[[int, str], None]


class Meeting:
    """The generation that this worker is to act under, and its group."""

    def __init__(self, worker_id: str, address: str, on_broken: OnBroken) -> None:
        self._worker_id = worker_id
        self._address = address
        self._on_broken = on_broken
        # Guards everything below; the channel's thread, opening threads and the main thread meet here. Reentrant.
        self._change = threading.Condition()
        self._generation: Generation | None = None
        self._group: GlooGroup | None = None
        self._opened = False
        self._fenced: str | None = None
        self.winding_down: str | None = None
        """Why the lighthouse wants the loop to end, if it does."""
        self.step = 0
        """The step in flight, for the points of the opening thread."""

    def direct(self, directive: Directive) -> None:
        """Follow a directive; an old or repeated one changes nothing."""
        generation = directive.generation
        self.winding_down = directive.winding_down
        with self._change:
            if self._worker_id in directive.fenced:
                self._fence(f"worker {self._worker_id} was declared lost; the job goes on without it")
            if generation is None or (self._generation is not None and generation.number <= self._generation.number):
                return
            if generation.rank_of(self._worker_id) is None:
                if self._generation is not None:
                    self._fence(f"worker {self._worker_id} is not in generation {generation.number}")
                return
            self._leave()
            self._generation = generation
            self._opened = len(generation.members) == 1
            self._change.notify_all()
        if len(generation.members) > 1:
            name = f"craft-open-{generation.number}"
            threading.Thread(target=self._open, args=(generation,), name=name, daemon=True).start()

    def _fence(self, reason: str) -> None:
        self._fenced = reason
        self._leave()
        self._change.notify_all()

    def _leave(self) -> None:
        """Abort the group: whoever is blocked in it comes out. An opening that is under way is left behind."""
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _open(self, generation: Generation) -> None:
        rank = generation.rank_of(self._worker_id)
        assert rank is not None
        reach("opening", self.step, rank)
        try:
            group = GlooGroup(generation, rank, self._address)
        except GroupError as error:
            self.broke(generation.number, error)
            return
        reach("opened", self.step, rank)
        with self._change:
            if self._generation is generation and self._fenced is None:
                self._group = group
                self._opened = True
                self._change.notify_all()
                return
        group.abort()

    def broke(self, number: int, error: Exception) -> None:
        """Say that the group of generation ``number`` broke, unless a newer one is there already."""
        if not self.newer(number):
            self._on_broken(number, str(error))

    def newer(self, number: int) -> bool:
        """Whether a generation after ``number`` is to be entered."""
        with self._change:
            return self._fenced is not None or (self._generation is not None and self._generation.number > number)

    def wait_newer(self, number: int) -> None:
        """Block until there is a generation after ``number``."""
        with self._change:
            self._change.wait_for(lambda: self.newer(number))

    def enter(self) -> tuple[Generation, GlooGroup | None]:
        """Return the newest generation and its group, once that is open. Raises Fenced if there is no place for us."""
        with self._change:
            self._change.wait_for(lambda: self._fenced is not None or self._opened)
            if self._fenced is not None:
                raise Fenced(self._fenced)
            assert self._generation is not None
            return self._generation, self._group

    def wait_generation(self) -> Generation:
        """Return the newest generation, open or not."""
        self.wait_newer(0)
        with self._change:
            if self._fenced is not None or self._generation is None:
                raise Fenced(self._fenced or "no generation")
            return self._generation

    def close(self) -> None:
        with self._change:
            self._leave()
