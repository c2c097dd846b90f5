"""Fault-tolerant collective calls between steps: every member's bytes to every member.

They follow the rule of the steps: a call returns when every participant has reported that it has all parts. So if it returned on
any worker, all have its result, and the members of a new generation know what to do: take it, or repeat the call. A joiner that
is catching up does not take part; it gets the results from members that remember them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import torch

from craft.decide.step.settle import name_of
from craft.groups.group import Group
from craft.protocol.errors import CallsDiffer, GroupError, LeftBehind, SnapshotError, Unreachable
from craft.protocol.membership import Generation, Member
from craft.snapshots.transfer.donor import Donor
from craft.snapshots.transfer.fetch import recall
from craft.telemetry.fault_points import reach
from craft.worker.membership.all_gather import gather_among
from craft.worker.membership.participant import Participant

logger = logging.getLogger(__name__)

_TAGS, _ROUND = (16, 17), 18
"""Tags, one per round of the acknowledgement. Below those of a step's buckets, next to those of its word."""
_END_OF_NAME = b"\0"
_SILENCE_S = 600.0
_AGAIN_S = 0.05


class CallPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the script where every worker makes the same calls."""

    name: str
    step: int
    """Committed steps there."""
    before_step: bool = False
    """Whether it is before the inner loop of a step; otherwise after one."""
    kept: bool = False
    """Whether a worker that joins at any later time passes it: outside the loops."""


class FaultTolerantCalls:
    """Makes collective calls and remembers their results. Owned by the main thread."""

    def __init__(self, participant: Participant, donor: Donor | None, key: bytes, regroup: Callable[[], None]) -> None:
        """``regroup`` enters the newest generation and reports it."""
        self._participant = participant
        self._donor = donor
        self._key = key
        self._regroup = regroup
        self._place = ("", 0)
        """A place of the script, and how many calls were made there."""
        self._recent: dict[str, bytes] = {}
        """Results of calls made before the step in flight began: a joiner in that step needs them."""
        self._name = ""
        """The call that the script is in."""
        self._alone = False
        """Whether this worker, which is catching up, makes calls alone."""

    def gather(
        self, call: str, data: bytes, place: CallPlace, under: int, behind: bool, followed: Callable[[], bool]
    ) -> list[bytes]:
        """Return the bytes of every participant in ``call``, in rank order.

        The last of ``place.step`` committed steps has a result of generation ``under``. ``behind``: this worker is catching up
        and takes the others' result. ``followed()``: whether the follower's thread also follows generations meanwhile; if not,
        this call does.
        """
        number = self._place[1] if self._place[0] == place.name else 0
        if number == 0:
            self._recent.clear()
        name = f"{place.name}/{number}"
        # Only workers at the same step can compare their calls.
        self._name = call if place.step == self._participant.step else ""
        self._alone = self._alone and behind
        parts = self._recall(name, under, data, followed) if behind else self._call(data)
        self._place = (place.name, number + 1)
        if self._donor is not None:
            self._remember(self._donor, name, msgspec.msgpack.encode(parts), place)
        return parts

    def _remember(self, donor: Donor, name: str, result: bytes, place: CallPlace) -> None:
        if place.kept:
            donor.keep(name, result)
        elif self._participant.ledger.idle:
            donor.remember(name, result)
        elif place.before_step:
            self._recent[name] = result

    def tell_joiners(self) -> None:
        """Pass the results of calls made before the step in flight to the joiners of a new generation."""
        if self._donor is not None:
            for name, result in self._recent.items():
                self._donor.remember(name, result)

    def left_alone(self, followed: Callable[[], bool]) -> bool:
        """Return, on a worker that is catching up, whether no current member is left.

        Until it has caught up it then makes calls alone: other workers that were behind may be at other places.
        """
        ledger = self._participant.ledger
        self._alone = self._alone or not (followed() or ledger.worker_id in ledger.idle)
        return self._alone

    def _call(self, data: bytes) -> list[bytes]:
        participant = self._participant
        number = participant.ledger.calls
        participant.begin_call(self._name)
        parts: list[bytes] = []
        while True:
            if participant.moved:
                self._regroup()
                if participant.ledger.calls > number:
                    # All remaining workers have all parts: the call returns them on each.
                    return parts
            try:
                parts = self._exchange(data)
                participant.receive_call()
                reach("called", participant.step)
                self._acknowledge()
            except GroupError as error:
                participant.broke(error)
                participant.await_move()
                continue
            participant.return_call()
            return parts

    def _exchange(self, data: bytes) -> list[bytes]:
        level = self._participant.ledger.step
        where = f"after step {level - 1}" if level else "before the first step"
        return exchange_named(
            self._participant, self._name, data, where, lambda: reach("calling", self._participant.step)
        )

    def _acknowledge(self) -> None:
        """Return once every participant has all parts: the same rounds as at the end of a step."""
        group, (ranks, position) = self._participant.group, taking_part(self._participant)
        if group is not None:
            barrier(group, ranks, position, _ROUND)

    def _recall(self, name: str, under: int, data: bytes, followed: Callable[[], bool]) -> list[bytes]:
        """Ask the oldest current member for the result of a call that it made, or is about to make."""
        participant = self._participant
        while True:
            if not followed() and participant.moved:
                self._regroup()
            if self.left_alone(followed):
                return [data]
            generation, ledger = participant.generation, participant.ledger
            assert generation is not None
            # The member of the lowest rank has been in the job longest, and knows all results.
            oldest = next(each for each in generation.members if each.worker_id not in ledger.idle)
            if oldest.since > under:
                raise LeftBehind(
                    f"no member is left that knows what call {name} returned: all current ones came later, and this worker is not"
                    " current: another one will come"
                )

            def outdated(under: Generation = generation) -> bool:
                moved = participant.generation is not under or (not followed() and participant.moved)
                # It may be this worker that was asked: its thread settled that it continues alone, and is about to end.
                return moved or self.left_alone(followed)

            if (found := ask_member(oldest, name, self._key, outdated)) is not None:
                return found
            # It died, and a newer generation will follow.
            time.sleep(_AGAIN_S)


def ask_member(member: Member, name: str, key: bytes, outdated: Callable[[], bool]) -> list[bytes] | None:
    """Return the result of a call that ``member`` made or is about to make; None if it dies or ``outdated()``."""
    try:
        found = recall((member.address, member.state_port), name, key, outdated, _SILENCE_S)
        return msgspec.msgpack.decode(found, type=list[bytes])
    except (SnapshotError, Unreachable) as error:
        logger.info("the result of call %s did not come from %s: %s", name, member.worker_id, error)
        return None


def taking_part(participant: Participant) -> tuple[list[int], int]:
    """Return the ranks of the current members, and this worker's position among them."""
    ledger = participant.ledger
    ranks = [rank for rank, member in enumerate(ledger.members) if member not in ledger.idle]
    return ranks, ranks.index(ledger.rank)


def exchange(participant: Participant, data: bytes, halfway: Callable[[], None] = lambda: None) -> list[bytes]:
    """Return the bytes of all current members, in rank order; raise GroupError if one is lost."""
    group, (ranks, position) = participant.group, taking_part(participant)
    if group is None or len(ranks) == 1:
        return [data]
    others = [rank for rank in ranks if rank != group.rank]
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    parts = [each.numpy().tobytes() for each in gather_among(group, others, row, _TAGS, halfway)]
    return [*parts[:position], data, *parts[position:]]


def exchange_named(
    participant: Participant, name: str, data: bytes, where: str, halfway: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Exchange like ``exchange``; raise CallsDiffer if other members are in another call than ``name``."""
    parts = exchange(participant, name.encode() + _END_OF_NAME + data, halfway)
    split = [part.partition(_END_OF_NAME) for part in parts]
    _compare(participant, [made.decode() for made, _, _ in split], where)
    return [part for _, _, part in split]


def _compare(participant: Participant, names: list[str], where: str) -> None:
    if len(set(names)) == 1 or "" in names:
        return
    ledger, (ranks, _) = participant.ledger, taking_part(participant)
    made = ", ".join(f"{ledger.members[rank]} {name_of(name)}" for rank, name in zip(ranks, names, strict=True))
    raise CallsDiffer(
        f"workers make different calls {where}: {made}:"
        " every worker has to make the same calls there, in the same order"
    )


def barrier(group: Group, ranks: list[int], position: int, first_tag: int) -> None:
    """Return once all ``ranks`` have called it; in round k each signals the one 2**k ahead."""
    size = len(ranks)
    signal = torch.zeros(1, dtype=torch.uint8)
    for number in range((size - 1).bit_length()):
        arrived = torch.zeros(1, dtype=torch.uint8)
        ahead, back = ranks[(position + (1 << number)) % size], ranks[(position - (1 << number)) % size]
        due = group.recv(arrived, back, first_tag + number)
        group.wait_all([group.send(signal, ahead, first_tag + number), due])
