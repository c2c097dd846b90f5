"""Follow directives, and bring this worker into the generations that they name.

The channel's thread calls ``direct``, code that finds a group broken calls ``broke``, and the main thread calls the rest.

There are two ways into a generation. A *current* one is entered as soon as possible, and the old group is aborted. An *upcoming*
one opens while the old group continues; all enter it at a step boundary for which every member reported itself ready, and the old
group is released only when the new one is settled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

import torch

from craft.protocol.errors import Fenced
from craft.protocol.generation_log import Moments
from craft.protocol.membership import Generation
from craft.protocol.messages import CheckpointWish, Directive, PreemptionOrder, Restoration
from craft.worker.membership.group_opening import AnyGroup, GroupOpener, OnBroken


class Left(SystemExit):
    """This worker leaves the job on request; the script ends as by ``sys.exit()``."""


class MembershipClient:
    """The generation that this worker acts under, the upcoming one, and their groups."""

    def __init__(
        self, worker_id: str, address: str, key: bytes, on_broken: OnBroken, on_left: Callable[[], None] = lambda: None
    ) -> None:
        """``key`` is the job's; unused in a job of one worker."""
        self._worker_id = worker_id
        self._on_broken = on_broken
        self._on_left = on_left
        # Guards everything below, which the channel's thread, opening threads and the main thread share. Reentrant.
        self._change = threading.Condition()
        self._places = GroupOpener(worker_id, address, key, self._change, on_broken, self.broke)
        self._leaving = 0
        """The upcoming generation that excludes this worker."""
        self._inside = False
        """Whether this worker has ever taken part in a generation."""
        self._entered = False
        """Whether it has entered one, and may have changed its state."""
        self._fenced: str | None = None
        self._over: str | None = None
        self._heard = False
        self.progress: tuple[int, ...] = ()
        """Branch, committed steps and calls completed since; the main thread writes it, any thread may report it."""
        self.left = False
        """Whether this worker has left the job on request."""
        self.slots = 1
        """Places in the job's layout."""
        self.winding_down: str | None = None
        """Why the lighthouse wants the loop to end, if it does."""
        self.preempting: PreemptionOrder | None = None
        """Why, and until when, the whole job must yield its resources, if it must."""
        self.saved: tuple[int, int] | None = None
        """Branch and steps of the newest complete checkpoint that the lighthouse knows."""
        self.wishes: tuple[CheckpointWish, ...] = ()
        """The latest requests for checkpoints."""
        self.generation: Generation | None = None
        """The lighthouse's current generation, with or without this worker."""
        self.loop = 1
        """The training loop of the script that the job is in, or has ended last."""
        self.finishing = 0
        """The generation whose members' scripts have all ended; 0: none."""
        self.restoration: Restoration | None = None
        """Where the job restarted from, if it did: members of its generations begin there, too."""

    def equip(self, device: torch.device | None) -> None:
        """Set the device whose tensors groups carry, before the first generation is entered."""
        with self._change:
            self._places.equip(device)

    def at(self, step: int) -> None:
        """Record that ``step`` is in flight."""
        self._places.step = step

    def direct(self, directive: Directive) -> None:
        """Follow a directive; an old or repeated one changes nothing."""
        self.winding_down = directive.winding_down
        self.preempting, self.wishes, self.saved = directive.preempting, directive.wishes, directive.saved
        with self._change:
            self._restore(directive.restoration)
            self._heard = True
            self.slots = directive.slots or self.slots
            self.loop, self.finishing, self.generation = directive.loop, directive.finishing, directive.generation
            self._change.notify_all()
            if self._worker_id in directive.fenced:
                self._fence(f"worker {self._worker_id} was declared lost; the job goes on without it")
            if not self._inside and (directive.stopping or self._worker_id in directive.released):
                self._over = directive.reason or "the job is over"
                self._change.notify_all()
            if directive.generation is not None:
                self._act_under(directive.generation)
            self._prepare(directive.upcoming)
        if directive.probe:
            self._places.probe(directive.probe)

    def _restore(self, restoration: Restoration | None) -> None:
        """Follow a restart of the job: earlier members are fenced, and a pending entry is abandoned."""
        known = self.restoration.number if self.restoration is not None else 0
        if restoration is None or restoration.number <= known:
            return
        self.restoration = restoration
        if self._entered:
            self._fence(
                f"the job began again without worker {self._worker_id}, from the checkpoint of step {restoration.step}"
            )
        elif self._places.current is not None and self._places.number <= restoration.after:
            self._places.current.abandon()
            self._places.current = None

    def _act_under(self, generation: Generation) -> None:
        if generation.number <= self._places.number:
            return
        if generation.rank_of(self._worker_id) is None:
            self._left_out(generation)
            return
        if self._places.upcoming is not None and self._places.upcoming.generation == generation:
            # The others entered it at their step boundary; this worker is about to reach it.
            self._places.follow()
        else:
            self._places.move(generation)

    def _left_out(self, generation: Generation) -> None:
        if not self._inside:
            # This spare was about to join, and has to wait again.
            if self._places.current is not None:
                self._places.current.abandon()
        elif self._leaving != generation.number:
            reason = f"worker {self._worker_id} is not in generation {generation.number}"
            if self._leaving:
                self._over = self._over or reason
            self._fence(reason)

    def _prepare(self, upcoming: Generation | None) -> None:
        """Open the group of the upcoming generation; drop one that is no longer wanted."""
        places = self._places
        if places.upcoming is not None and places.upcoming.generation != upcoming:
            places.upcoming.abandon()
            places.upcoming = None
        if upcoming is None or upcoming.number <= places.number:
            return
        if upcoming.rank_of(self._worker_id) is None:
            if self._inside:
                self._leaving = upcoming.number
            return
        if not self._inside:
            # Nothing to finish first: the others enter when they reach their step boundary.
            if places.current is not None:
                places.current.abandon()
            places.current = places.begin(upcoming)
            self._change.notify_all()
        elif places.upcoming is None:
            places.upcoming = places.begin(upcoming)

    def _fence(self, reason: str) -> None:
        self._fenced = reason
        self._places.abandon()
        self._change.notify_all()

    def broke(self, number: int, error: Exception) -> None:
        """Report that the group of generation ``number`` broke, unless a newer one exists."""
        if self.newer(number):
            return
        self._on_broken(self._places.broke(number, error))
        self._places.probe(number)

    @property
    def ready(self) -> int:
        """The newest generation that this worker is ready for: its group is open, or it excludes this worker."""
        with self._change:
            if self._leaving:
                return self._leaving
            if self._places.upcoming is not None and self._places.upcoming.opened:
                return self._places.upcoming.generation.number
            return self._places.number

    def agree(self, number: int) -> None:
        """Enter generation ``number`` at this step boundary: every member is ready for it.

        Raises Left if it excludes this worker.
        """
        with self._change:
            if self._places.upcoming is not None and self._places.upcoming.generation.number == number:
                self._places.follow()
            self.check_leaving(number)

    def check_leaving(self, number: int) -> None:
        """Raise Left if every member was ready for generation ``number``, which excludes this worker.

        The others may have entered it and continued: this worker's data may be old.
        """
        with self._change:
            if self._leaving and self._leaving == number:
                self.leave()

    def settled(self, number: int) -> None:
        """Abandon older groups: the members of generation ``number`` have settled."""
        with self._change:
            self._inside = True
            if self._leaving <= number:
                self._leaving = 0
            old, self._places.left_behind = self._places.left_behind, []
        for place in old:
            place.abandon()

    def newer(self, number: int) -> bool:
        """Return whether a generation after ``number`` is to be entered."""
        with self._change:
            return self._gone or self._places.number > number

    def wait_newer(self, number: int) -> None:
        """Block until there is a generation after ``number``."""
        with self._change:
            self._change.wait_for(lambda: self.newer(number))

    def wait_others(self) -> None:
        """Wait, on a late worker, until there is a generation or the whole job restarts."""
        with self._change:
            self._change.wait_for(lambda: self.generation is not None or self.restoration is not None or self._gone)

    def wait_finish(self, number: int) -> bool:
        """Wait until all workers' scripts end; return False if a generation after ``number`` is to be entered."""
        with self._change:
            self._change.wait_for(lambda: self.finishing >= number or self.newer(number))
            return self.finishing >= number

    def wait_saved(self, place: tuple[int, int], number: int, limit_s: float) -> bool:
        """Wait up to ``limit_s`` until the checkpoint of ``place``, a branch and a step, is complete.

        Returns False if a generation after ``number`` is to be entered instead: a worker was lost before it was complete.
        """

        def saved() -> bool:
            return self.saved is not None and self.saved >= place

        with self._change:
            self._change.wait_for(lambda: saved() or self.newer(number), limit_s)
            return saved() or not self.newer(number)

    def enter(self) -> tuple[Generation, AnyGroup | None, Moments]:
        """Return the newest generation and its group, once open, and the times of its opening.

        Raises Fenced or Left if there is no place for this worker.
        """
        with self._change:
            if not self._places.equipped:
                self._places.equip(None)
            self._change.wait_for(lambda: self._gone or self._may_enter)
            self._check_gone()
            place = self._places.current
            assert place is not None
            if place.problem is not None:
                raise place.problem
            self._entered = True
            return place.generation, place.group, place.moments

    def inner_of(self, number: int) -> AnyGroup | None:
        """Return the group of this worker's replica in generation ``number``, if it is complete and the current one."""
        with self._change:
            place = self._places.current
            return place.inner if place is not None and place.generation.number == number else None

    def wait_inner(self) -> tuple[Generation, AnyGroup | None]:
        """Return the first generation, and the group of this worker's replica in it once it is open, if it opens."""
        with self._change:
            self._change.wait_for(lambda: self._gone or self._places.current is not None)
            self._check_gone()
            place = self._places.current
            assert place is not None
            self._change.wait_for(lambda: place.inner is not None or place.group is not None or place.abandoned)
            return place.generation, place.inner

    def wait_generation(self) -> Generation:
        """Return the newest generation, open or not."""
        self.wait_newer(0)
        with self._change:
            self._check_gone()
            assert self._places.current is not None
            return self._places.current.generation

    def wait_directive(self) -> None:
        """Block until the first directive from the lighthouse."""
        with self._change:
            self._change.wait_for(lambda: self._heard)

    @property
    def number(self) -> int:
        """Number of the known current generation; 0 before the first."""
        with self._change:
            return self._places.number

    @property
    def members(self) -> tuple[str, ...]:
        """Workers of the known current generation; () before the first."""
        with self._change:
            current = self._places.current
            return current.generation.worker_ids if current is not None else ()

    @property
    def _may_enter(self) -> bool:
        place = self._places.current
        return place is not None and (place.opened or place.problem is not None)

    @property
    def _gone(self) -> bool:
        return self._fenced is not None or (self._over is not None and not self._inside)

    def _check_gone(self) -> None:
        if self._over is not None:
            self.leave()
        if self._fenced is not None:
            raise Fenced(self._fenced)

    def leave(self) -> NoReturn:
        """Leave the job: raises Left."""
        self.left = True
        self._on_left()
        raise Left(0)

    def cut_one(self) -> bool:
        """Cut one connection of the current group, for fault tests; return False if it has none."""
        with self._change:
            place = self._places.current
            group = place.group if place is not None and place.opened else None
        return group is not None and group.cut_one()

    def close(self) -> None:
        with self._change:
            self._places.abandon()
