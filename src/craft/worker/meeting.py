"""Where the members of a generation meet: takes directives, aborts the old group at once, opens the new one behind the scenes.

Called by the channel's thread (``direct``) and by the main thread (the rest). A group opens on a thread of its own, which
is left behind if a newer generation comes first: opening may hang when a member dies.

There are two ways into a generation. One that is *current* is entered as soon as possible, and the old group is aborted.
One that is *upcoming* opens while the old group goes on; it is entered at a step boundary for which every member said that
it is ready, and the old group is let go only when the new one is settled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch
from msgspec.structs import replace

from craft.groups.gloo import GlooGroup
from craft.groups.nccl import NcclGroup
from craft.groups.reach import unreachable
from craft.protocol.entries import Moments
from craft.protocol.errors import Fenced, GroupError
from craft.protocol.membership import Generation
from craft.protocol.messages import CheckpointWish, Directive, Preemption, Restoration
from craft.worker.devices import connect_devices
from craft.worker.points import reach

logger = logging.getLogger(__name__)

_OPEN_LIMIT_S = 15.0

AnyGroup = GlooGroup | NcclGroup
OnBroken = Callable[[int, str, tuple[str, ...]], None]


class Left(SystemExit):
    """This worker leaves the job, as it was told; the script ends as it would by ``sys.exit()``."""


class _Place:
    """One generation to meet in, and its group once that is open."""

    def __init__(self, generation: Generation, moments: Moments) -> None:
        self.generation = generation
        self.group: AnyGroup | None = None
        """Not to be used before it is opened: until then there may be more to it."""
        self.problem: Exception | None = None
        """Why it will never open; not for the lighthouse to judge."""
        self.opened = len(generation.members) == 1
        self.abandoned = False
        self.moments = replace(moments, met=time.time())

    def abandon(self) -> None:
        """Abort the group: whoever is blocked in it comes out. An opening that is under way is left behind."""
        self.abandoned = True
        if self.group is not None:
            self.group.abort()


class Meeting:
    """The generation that this worker is to act under, the one to come, and their groups."""

    def __init__(
        self, worker_id: str, address: str, on_broken: OnBroken, on_left: Callable[[], None] = lambda: None
    ) -> None:
        self._worker_id = worker_id
        self._address = address
        self._on_broken = on_broken
        self._on_left = on_left
        # Guards everything below; the channel's thread, opening threads and the main thread meet here. Reentrant.
        self._change = threading.Condition()
        self._equipped = False
        self._device: torch.device | None = None
        """Between which devices groups are to carry tensors; not known before the script has said where its model is."""
        self._current: _Place | None = None
        self._next: _Place | None = None
        self._left_behind: list[_Place] = []
        """What was current before a generation was entered at a step boundary."""
        self._leaving = 0
        """The upcoming generation in which this worker is not."""
        self._inside = False
        """Whether this worker has ever taken part in a generation."""
        self._entered = False
        """Whether it has entered one, and may have changed its state."""
        self._fenced: str | None = None
        self._over: str | None = None
        self._probed = 0
        self._heard = False
        self.slots = 1
        """Places in the job's layout."""
        self.winding_down: str | None = None
        """Why the lighthouse wants the loop to end, if it does."""
        self.preempting: Preemption | None = None
        """Why, and until when, the whole job is to make room, if it is."""
        self.saved: tuple[int, int] | None = None
        """Branch and steps of the newest complete checkpoint, as far as the lighthouse says."""
        self.wishes: tuple[CheckpointWish, ...] = ()
        """The latest wishes for checkpoints."""
        self.restoration: Restoration | None = None
        """From where the job began again, if it did: those in its generations begin there, too."""
        self.step = 0
        """The step in flight, for the points of the opening thread."""

    def equip(self, device: torch.device | None) -> None:
        """From now on groups carry tensors between these devices; before the first generation is entered."""
        with self._change:
            self._equipped, self._device = True, device
            self._change.notify_all()

    def direct(self, directive: Directive) -> None:
        """Follow a directive; an old or repeated one changes nothing."""
        self.winding_down = directive.winding_down
        self.preempting, self.wishes, self.saved = directive.preempting, directive.wishes, directive.saved
        with self._change:
            self._restore(directive.restoration)
            self._heard = True
            self.slots = directive.slots or self.slots
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
            self._probe(directive.probe)

    def _restore(self, restoration: Restoration | None) -> None:
        """The job began again: who took part before has no place in it, and who was about to waits for another one."""
        known = self.restoration.number if self.restoration is not None else 0
        if restoration is None or restoration.number <= known:
            return
        self.restoration = restoration
        if self._entered:
            self._fence(
                f"the job began again without worker {self._worker_id}, from the checkpoint of step {restoration.step}"
            )
        elif self._current is not None and self._current.generation.number <= restoration.after:
            self._current.abandon()
            self._current = None

    def _act_under(self, generation: Generation) -> None:
        if self._current is not None and generation.number <= self._current.generation.number:
            return
        if generation.rank_of(self._worker_id) is None:
            self._left_out(generation)
            return
        if self._next is not None and self._next.generation == generation:
            # The others have entered it at their step boundary; this worker is about to come to its own.
            self._follow()
            return
        told = time.time()
        for place in (self._current, self._next, *self._left_behind):
            if place is not None:
                place.abandon()
        self._next, self._left_behind = None, []
        moments = Moments(told=told, aborted=time.time() if self._current is not None else None)
        self._current = self._begin(generation, moments)
        self._change.notify_all()

    def _left_out(self, generation: Generation) -> None:
        if not self._inside:
            # A spare that was about to join, and has to wait again.
            if self._current is not None:
                self._current.abandon()
        elif self._leaving != generation.number:
            reason = f"worker {self._worker_id} is not in generation {generation.number}"
            if self._leaving:
                self._over = self._over or reason
            self._fence(reason)

    def _prepare(self, upcoming: Generation | None) -> None:
        """Open the group of the upcoming generation; one that is no longer wanted is dropped."""
        if self._next is not None and self._next.generation != upcoming:
            self._next.abandon()
            self._next = None
        if upcoming is None or (self._current is not None and upcoming.number <= self._current.generation.number):
            return
        if upcoming.rank_of(self._worker_id) is None:
            if self._inside:
                self._leaving = upcoming.number
            return
        if not self._inside:
            # Nothing to finish before: the others come when they are at their step boundary.
            if self._current is not None:
                self._current.abandon()
            self._current = self._begin(upcoming)
            self._change.notify_all()
        elif self._next is None:
            self._next = self._begin(upcoming)

    def _begin(self, generation: Generation, moments: Moments | None = None) -> _Place:
        place = _Place(generation, moments or Moments(told=time.time()))
        if not place.opened:
            name = f"craft-open-{generation.number}"
            threading.Thread(target=self._open, args=(place,), name=name, daemon=True).start()
        return place

    def _fence(self, reason: str) -> None:
        self._fenced = reason
        for place in (self._current, self._next, *self._left_behind):
            if place is not None:
                place.abandon()
        self._change.notify_all()

    def _open(self, place: _Place) -> None:
        generation = place.generation
        rank = generation.rank_of(self._worker_id)
        assert rank is not None
        reach("opening", self.step, rank)
        began = time.monotonic()
        try:
            self._connect(place, GlooGroup(generation, rank, self._address, _OPEN_LIMIT_S))
        except GroupError as error:
            if time.monotonic() - began > _OPEN_LIMIT_S / 2 and not place.abandoned:
                # Everybody's limit ends at about the same time: first find out who is out of reach, then say it all.
                self._look(place, str(error))
            elif not place.abandoned:
                self.broke(generation.number, error)
        except Exception as error:  # noqa: BLE001  (the edge of a thread: the main thread raises it)
            with self._change:
                place.problem = error
                self._change.notify_all()

    def _connect(self, place: _Place, gloo: GlooGroup) -> None:
        """The members have met. Those whose tensors are on devices connect these, too, once all know which they are."""
        reach("opened", self.step, gloo.rank)
        with self._change:
            # Known to ``abandon`` from here on: what follows may have to be aborted.
            place.group = gloo
            place.moments = replace(place.moments, met=time.time())
            self._change.wait_for(lambda: self._equipped or place.abandoned)
            device = self._device
        group: AnyGroup = gloo
        if device is not None and not place.abandoned:
            group = connect_devices(gloo, device)
        with self._change:
            if not place.abandoned:
                place.group = group
                place.opened = True
                self._change.notify_all()
                return
        group.abort()

    def broke(self, number: int, error: Exception) -> None:
        """Say that the group of generation ``number`` broke, unless a newer one is there already."""
        if self.newer(number):
            return
        self._on_broken(number, str(error), ())
        self._probe(number)

    def _probe(self, number: int) -> None:
        """Find out, behind the scenes, which members cannot be reached, and say so."""
        with self._change:
            places = [place for place in (self._current, self._next) if place is not None]
            place = next((each for each in places if each.generation.number == number), None)
            if place is None or self._probed >= number:
                return
            self._probed = number

        args = (place, "stuck, though every member can be reached")
        threading.Thread(target=self._look, args=args, name=f"craft-probe-{number}", daemon=True).start()

    def _look(self, place: _Place, otherwise: str) -> None:
        missing = unreachable(place.generation, self._worker_id)
        if not place.abandoned:
            detail = f"no connection to {', '.join(missing)}" if missing else otherwise
            self._on_broken(place.generation.number, detail, missing)

    @property
    def ready(self) -> int:
        """The newest generation for which this worker is ready: its group is open, or it is one without this worker."""
        with self._change:
            if self._leaving:
                return self._leaving
            if self._next is not None and self._next.opened:
                return self._next.generation.number
            return self._current.generation.number if self._current is not None else 0

    def agree(self, number: int) -> None:
        """Every member is ready for generation ``number``: at this step boundary all enter it.

        Raises Left if it has no place for this worker.
        """
        with self._change:
            if self._next is not None and self._next.generation.number == number:
                self._follow()
            self.check_leaving(number)

    def check_leaving(self, number: int) -> None:
        """Raise Left if every member was ready for generation ``number``, in which this worker is not.

        The others may have entered it and gone on: what this worker has may be old.
        """
        with self._change:
            if self._leaving and self._leaving == number:
                self.leave()

    def _follow(self) -> None:
        if self._current is not None:
            # Not aborted: another member may still be reading what was sent to it there.
            self._left_behind.append(self._current)
        self._current, self._next = self._next, None
        self._change.notify_all()

    def settled(self, number: int) -> None:
        """The members of generation ``number`` have settled: nobody needs an older one any more."""
        with self._change:
            self._inside = True
            if self._leaving <= number:
                self._leaving = 0
            old, self._left_behind = self._left_behind, []
        for place in old:
            place.abandon()

    def newer(self, number: int) -> bool:
        """Whether a generation after ``number`` is to be entered."""
        with self._change:
            return (
                self._fenced is not None
                or (self._over is not None and not self._inside)
                or (self._current is not None and self._current.generation.number > number)
            )

    def wait_newer(self, number: int) -> None:
        """Block until there is a generation after ``number``."""
        with self._change:
            self._change.wait_for(lambda: self.newer(number))

    def wait_saved(self, place: tuple[int, int], number: int, limit_s: float) -> bool:
        """Wait until the checkpoint of ``place``, a branch and a step, is complete, or for so long.

        Returns False if a generation after ``number`` is to be entered instead: somebody was lost before it was complete.
        """

        def saved() -> bool:
            return self.saved is not None and self.saved >= place

        with self._change:
            self._change.wait_for(lambda: saved() or self.newer(number), limit_s)
            return saved() or not self.newer(number)

    def enter(self) -> tuple[Generation, AnyGroup | None, Moments]:
        """Return the newest generation and its group, once that is open, and how it came to that.

        Raises Fenced or Left if there is no place for us.
        """
        with self._change:
            if not self._equipped:
                self.equip(None)
            self._change.wait_for(lambda: self._gone or self._may_enter)
            self._check_gone()
            assert self._current is not None
            if self._current.problem is not None:
                raise self._current.problem
            self._entered = True
            return self._current.generation, self._current.group, self._current.moments

    def wait_generation(self) -> Generation:
        """Return the newest generation, open or not."""
        self.wait_newer(0)
        with self._change:
            self._check_gone()
            assert self._current is not None
            return self._current.generation

    def wait_directive(self) -> None:
        """Block until the lighthouse has said anything at all."""
        with self._change:
            self._change.wait_for(lambda: self._heard)

    @property
    def number(self) -> int:
        """The generation that is known to be current; 0 if there is none yet."""
        with self._change:
            return self._current.generation.number if self._current is not None else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Workers of the generation that is known to be current; () if there is none yet."""
        with self._change:
            return self._current.generation.worker_ids if self._current is not None else ()

    @property
    def _may_enter(self) -> bool:
        place = self._current
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
        self._on_left()
        raise Left(0)

    def cut_one(self) -> bool:
        """For tests of jobs: cut one connection of the current group; False if it has none."""
        with self._change:
            group = self._current.group if self._current is not None and self._current.opened else None
        return group is not None and group.cut_one()

    def close(self) -> None:
        with self._change:
            for place in (self._current, self._next, *self._left_behind):
                if place is not None:
                    place.abandon()
