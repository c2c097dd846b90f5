"""Open the group of each generation, on a separate thread.

Input: a generation from ``MembershipClient``, which decides when one is wanted and when no longer. Output: an open group, or the
reason for the failure. The opening thread is abandoned if a newer generation comes first: opening may hang when a member dies.

Where a replica has several workers, each complete replica opens a second group, of its workers alone. A newer generation does
not abort that one, unless it is without a worker of the replica: other workers' losses must not break an update.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from msgspec.structs import replace

from craft.decide.step.replicas import layout_of
from craft.groups.gloo import GlooGroup
from craft.groups.nccl import NcclGroup
from craft.groups.reachability import unreachable
from craft.protocol.errors import GroupBroken, GroupError, GroupTimeout
from craft.protocol.generation_log import Moments
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Broken
from craft.telemetry.fault_points import reach
from craft.worker.membership.devices import connect_devices

_OPEN_LIMIT_S = 15.0

AnyGroup = GlooGroup | NcclGroup
OnBroken = Callable[[Broken], None]


class OpeningGroup:
    """One generation and its group, which is used once it is open."""

    def __init__(self, generation: Generation, moments: Moments) -> None:
        self.generation = generation
        self.group: AnyGroup | None = None
        """Not to be used before ``opened``: until then it may lack its devices."""
        self.inner: AnyGroup | None = None
        """The group of this worker's replica, if that is complete and has several workers; without devices at first."""
        self.problem: Exception | None = None
        """Why it will never open; the lighthouse does not judge this."""
        self.opened = len(generation.members) == 1
        self.abandoned = False
        self.missed: tuple[str, ...] = ()
        """Members that caused it to break, as far as known."""
        self.moments = replace(moments, met=time.time())

    def abandon(self, *, inner: bool = True) -> None:
        """Abort the group, which unblocks its callers; an opening in progress is abandoned.

        ``inner``: also that of the replica.
        """
        self.abandoned = True
        if self.group is not None:
            self.group.abort()
        if inner and self.inner is not None:
            self.inner.abort()

    def broke(self, error: Exception) -> None:
        """Record the members that ``error`` blames."""
        if isinstance(error, GroupTimeout):
            self.missed = error.missed
        elif isinstance(error, GroupBroken) and 0 <= error.peer < len(self.generation.members):
            self.missed = (self.generation.members[error.peer].worker_id,)


class GroupOpener:
    """The current, upcoming and previous groups. Guarded by the lock of ``MembershipClient``."""

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
        """Groups that were current before a generation was entered at a step boundary."""
        self.step = 0
        """The step in flight, for the fault points of the opening thread."""
        self.equipped = False
        """Whether the device of the model is known: a group of several members does not open before."""
        self._device: torch.device | None = None
        self._probed = 0

    @property
    def number(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self.current.generation.number if self.current is not None else 0

    def equip(self, device: torch.device | None) -> None:
        """Set the device whose tensors groups carry from now on."""
        self.equipped, self._device = True, device
        self._change.notify_all()

    def begin(self, generation: Generation, moments: Moments | None = None) -> OpeningGroup:
        """Start opening the group of ``generation``."""
        place = OpeningGroup(generation, moments or Moments(told=time.time()))
        if not place.opened:
            name = f"craft-open-{generation.number}"
            threading.Thread(target=self._open, args=(place,), name=name, daemon=True).start()
        return place

    def move(self, generation: Generation) -> None:
        """Make ``generation`` current: every other group is aborted at once."""
        told = time.time()
        old = self._set_aside(generation)
        self.upcoming, self.left_behind = None, old
        moments = Moments(told=told, aborted=time.time() if self.current is not None else None)
        self.current = self.begin(generation, moments)
        self._change.notify_all()

    def _set_aside(self, generation: Generation) -> list[OpeningGroup]:
        """Abort every group but the replica's that ``generation`` leaves whole; return its place.

        It is used until this worker enters ``generation``, at a point that all workers of the replica agree on.
        """
        kept = []
        for place in (self.current, self.upcoming, *self.left_behind):
            if place is None:
                continue
            inner = (
                place is self.upcoming
                or place.inner is None
                or not _keeps(generation, place.generation, self._worker_id)
            )
            place.abandon(inner=inner)
            if not inner:
                kept.append(place)
        return kept

    def follow(self) -> None:
        """Make the upcoming generation current."""
        if self.current is not None:
            # Not aborted: another member may still be reading data sent there.
            self.left_behind.append(self.current)
        self.current, self.upcoming = self.upcoming, None
        self._change.notify_all()

    def abandon(self) -> None:
        """Abort every group."""
        for place in (self.current, self.upcoming, *self.left_behind):
            if place is not None:
                place.abandon()

    def probe(self, number: int) -> None:
        """Find unreachable members of generation ``number`` on a thread, and report them."""
        with self._change:
            place = self._place_of(number)
            if place is None or self._probed >= number:
                return
            self._probed = number

        args = (place, "stuck, though every member can be reached")
        threading.Thread(target=self._look, args=args, name=f"craft-probe-{number}", daemon=True).start()

    def broke(self, number: int, error: Exception) -> Broken:
        """Return the report on generation ``number``, whose group broke."""
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
            whole_models = not layout_of(generation).slots
            gloo = GlooGroup(generation, rank, self._address, self._key, _OPEN_LIMIT_S, directly=whole_models)
            self._open_inner(place)
            self._connect(place, gloo)
        except GroupError as error:
            place.broke(error)
            if time.monotonic() - began > _OPEN_LIMIT_S / 2 and not place.abandoned:
                # All members' limits end at about the same time: first find the unreachable members, then report once.
                self._look(place, str(error))
            elif not place.abandoned:
                self._broke(generation.number, error)
        except Exception as error:  # noqa: BLE001  (the edge of a thread: the main thread raises it)
            with self._change:
                place.problem = error
                self._change.notify_all()

    def _open_inner(self, place: OpeningGroup) -> None:
        """Open the group of this worker's replica, if that is complete and has several workers."""
        mates = mates_of(place.generation, self._worker_id)
        if len(mates) == 1 or place.abandoned:
            return
        # Named like the generation and its replica, whose number no other replica of the generation has.
        first = mates[0]
        nonce = f"{place.generation.nonce}-{first.worker_id}"
        inner = Generation(number=place.generation.number, nonce=nonce, members=mates)
        rank = inner.rank_of(self._worker_id)
        assert rank is not None
        group = GlooGroup(inner, rank, self._address, self._key, _OPEN_LIMIT_S, directly=True)
        with self._change:
            place.inner = group
            abandoned = place.abandoned
            self._change.notify_all()
        if abandoned:
            group.abort()

    def _connect(self, place: OpeningGroup, gloo: GlooGroup) -> None:
        """Connect the members' devices, if tensors are on devices, after the Gloo group is open."""
        reach("opened", self.step, gloo.rank)
        with self._change:
            # ``abandon`` sees it from here on: the following steps may have to be aborted.
            place.group = gloo
            place.moments = replace(place.moments, met=time.time())
            self._change.wait_for(lambda: self.equipped or place.abandoned)
            device = self._device
        group: AnyGroup = gloo
        inner = place.inner
        if device is not None and not place.abandoned:
            group = connect_devices(gloo, device)
            if isinstance(inner, GlooGroup):
                inner = connect_devices(inner, device)
        with self._change:
            place.inner = inner
            if not place.abandoned:
                place.group = group
                place.opened = True
                self._change.notify_all()
                return
        group.abort()
        if inner is not None:
            inner.abort()

    def _look(self, place: OpeningGroup, otherwise: str) -> None:
        missing = unreachable(place.generation, self._worker_id)
        if not place.abandoned:
            detail = f"no connection to {', '.join(missing)}" if missing else otherwise
            number = place.generation.number
            self._on_broken(Broken(generation=number, detail=detail, unreachable=missing, missed=place.missed))


def mates_of(generation: Generation, worker_id: str) -> tuple[Member, ...]:
    """Return the members of a worker's replica in the order of positions; only itself if the replica is not complete."""
    layout, rank = layout_of(generation), generation.rank_of(worker_id)
    assert rank is not None
    ranks = layout.mates(rank) if layout.is_complete(layout.replica_of(rank)) else (rank,)
    return tuple(generation.members[each] for each in ranks)


def _keeps(new: Generation, old: Generation, worker_id: str) -> bool:
    """Return whether ``new`` has every worker of the replica that a worker has in ``old``."""
    return all(new.rank_of(mate.worker_id) is not None for mate in mates_of(old, worker_id))
