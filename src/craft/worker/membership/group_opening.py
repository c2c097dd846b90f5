"""Places to meet in: one for each generation, and its group, which opens on a thread of its own.

Enters: a generation, from ``Meeting``, which says when one is wanted and when no longer. Leaves: an open group, or word of why
there is none. A thread that opens one is left behind if a newer generation comes first: opening may hang when a member dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from msgspec.structs import replace

from craft.groups.gloo import GlooGroup
from craft.groups.nccl import NcclGroup
from craft.groups.reachability import unreachable
from craft.protocol.errors import GroupBroken, GroupError, GroupTimeout
from craft.protocol.generation_log import Moments
from craft.protocol.membership import Generation
from craft.protocol.messages import Broken
from craft.telemetry.fault_points import reach
from craft.worker.membership.devices import connect_devices

_OPEN_LIMIT_S = 15.0

AnyGroup = GlooGroup | NcclGroup
OnBroken = Callable[[Broken], None]


class OpeningGroup:
    """One generation to meet in, and its group once that is open."""

    def __init__(self, generation: Generation, moments: Moments) -> None:
        self.generation = generation
        self.group: AnyGroup | None = None
        """Not to be used before it is opened: until then there may be more to it."""
        self.problem: Exception | None = None
        """Why it will never open; not for the lighthouse to judge."""
        self.opened = len(generation.members) == 1
        self.abandoned = False
        self.missed: tuple[str, ...] = ()
        """Members because of which it broke, as far as that is known."""
        self.moments = replace(moments, met=time.time())

    def abandon(self) -> None:
        """Abort the group: whoever is blocked in it comes out. An opening that is under way is left behind."""
        self.abandoned = True
        if self.group is not None:
            self.group.abort()

    def broke(self, error: Exception) -> None:
        """Note because of whom, if ``error`` says so."""
        if isinstance(error, GroupTimeout):
            self.missed = error.missed
        elif isinstance(error, GroupBroken) and 0 <= error.peer < len(self.generation.members):
            self.missed = (self.generation.members[error.peer].worker_id,)


class GroupOpener:
    """Where this worker meets the others: now, soon, and where it did before. Guarded by the lock of ``Meeting``."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        key: bytes,
        change: threading.Condition,
        on_broken: OnBroken,
        broke: Callable[[int, Exception], None],
    ) -> None:
        """``change`` is that lock; ``broke(generation, error)`` is called if a group does not open."""
        self._worker_id = worker_id
        self._address = address
        self._key = key
        self._change = change
        self._on_broken = on_broken
        self._broke = broke
        self.current: OpeningGroup | None = None
        self.upcoming: OpeningGroup | None = None
        self.left_behind: list[OpeningGroup] = []
        """What was current before a generation was entered at a step boundary."""
        self.step = 0
        """The step in flight, for the points of the opening thread."""
        self.equipped = False
        """Whether the script has said where its model is: not before that does a group open whose members have met."""
        self._device: torch.device | None = None
        self._probed = 0

    @property
    def number(self) -> int:
        """The generation that is current; 0 if there is none yet."""
        return self.current.generation.number if self.current is not None else 0

    def equip(self, device: torch.device | None) -> None:
        """From now on groups carry tensors between these devices."""
        self.equipped, self._device = True, device
        self._change.notify_all()

    def begin(self, generation: Generation, moments: Moments | None = None) -> OpeningGroup:
        """Begin to open the group of ``generation``."""
        place = OpeningGroup(generation, moments or Moments(told=time.time()))
        if not place.opened:
            name = f"craft-open-{generation.number}"
            threading.Thread(target=self._open, args=(place,), name=name, daemon=True).start()
        return place

    def move(self, generation: Generation) -> None:
        """Meet in ``generation`` and nowhere else: every other group is aborted at once."""
        told = time.time()
        self.abandon()
        self.upcoming, self.left_behind = None, []
        moments = Moments(told=told, aborted=time.time() if self.current is not None else None)
        self.current = self.begin(generation, moments)
        self._change.notify_all()

    def follow(self) -> None:
        """Go on where the upcoming generation meets."""
        if self.current is not None:
            # Not aborted: another member may still be reading what was sent to it there.
            self.left_behind.append(self.current)
        self.current, self.upcoming = self.upcoming, None
        self._change.notify_all()

    def abandon(self) -> None:
        """Abort every group."""
        for place in (self.current, self.upcoming, *self.left_behind):
            if place is not None:
                place.abandon()

    def probe(self, number: int) -> None:
        """Find out, behind the scenes, which members of generation ``number`` cannot be reached, and say so."""
        with self._change:
            place = self._place_of(number)
            if place is None or self._probed >= number:
                return
            self._probed = number

        args = (place, "stuck, though every member can be reached")
        threading.Thread(target=self._look, args=args, name=f"craft-probe-{number}", daemon=True).start()

    def broke(self, number: int, error: Exception) -> Broken:
        """Return what is to be said of generation ``number``, whose group broke."""
        with self._change:
            place = self._place_of(number)
            if place is not None:
                place.broke(error)
            return Broken(generation=number, detail=str(error), missed=place.missed if place is not None else ())

    def _place_of(self, number: int) -> OpeningGroup | None:
        places = (self.current, self.upcoming)
        return next((each for each in places if each is not None and each.generation.number == number), None)

    def _open(self, place: OpeningGroup) -> None:
        generation = place.generation
        rank = generation.rank_of(self._worker_id)
        assert rank is not None
        reach("opening", self.step, rank)
        began = time.monotonic()
        try:
            self._connect(place, GlooGroup(generation, rank, self._address, self._key, _OPEN_LIMIT_S))
        except GroupError as error:
            place.broke(error)
            if time.monotonic() - began > _OPEN_LIMIT_S / 2 and not place.abandoned:
                # Everybody's limit ends at about the same time: first find out who is out of reach, then say it all.
                self._look(place, str(error))
            elif not place.abandoned:
                self._broke(generation.number, error)
        except Exception as error:  # noqa: BLE001  (the edge of a thread: the main thread raises it)
            with self._change:
                place.problem = error
                self._change.notify_all()

    def _connect(self, place: OpeningGroup, gloo: GlooGroup) -> None:
        """The members have met. Those whose tensors are on devices connect these, too, once all know which they are."""
        reach("opened", self.step, gloo.rank)
        with self._change:
            # Known to ``abandon`` from here on: what follows may have to be aborted.
            place.group = gloo
            place.moments = replace(place.moments, met=time.time())
            self._change.wait_for(lambda: self.equipped or place.abandoned)
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

    def _look(self, place: OpeningGroup, otherwise: str) -> None:
        missing = unreachable(place.generation, self._worker_id)
        if not place.abandoned:
            detail = f"no connection to {', '.join(missing)}" if missing else otherwise
            number = place.generation.number
            self._on_broken(Broken(generation=number, detail=detail, unreachable=missing, missed=place.missed))
