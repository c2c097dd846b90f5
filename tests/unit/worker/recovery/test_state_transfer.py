"""When a worker makes room for its part of the state, for those who will join."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from craft.worker.recovery import state_transfer
from craft.worker.recovery.state_transfer import StateTransfer

GIB = 1 << 30


class Rooms:
    """Of a donor, only what it is asked to make room for."""

    prepared = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def reserve(self, size: int) -> None:
        self.asked.append(size)

    def forget(self) -> None:
        pass


def healing_of(rooms: Rooms, *, on_device: bool) -> StateTransfer:
    header = SimpleNamespace(total_bytes=6 * GIB, on_device=(0,) if on_device else (), entries=(), module_entries=0)
    lifecycle = SimpleNamespace(state=lambda: SimpleNamespace(header=header))
    participant = SimpleNamespace(slots=3, ledger=SimpleNamespace(idle=(), members=("a", "b", "c")))
    settings = SimpleNamespace(state_key_bytes=b"")
    context = SimpleNamespace(
        donor=rooms, settings=settings, participant=participant, modules={}, registered={}, reserve=None
    )
    return StateTransfer(cast(Any, context), cast(Any, lifecycle))


def test_on_a_device_room_is_made_before_anybody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "can_wait_there", lambda size: True)
    rooms = Rooms()
    transfer = healing_of(rooms, on_device=True)
    transfer.committed(computed=True)
    assert not rooms.asked, "how large the state is was not known yet"
    transfer.measure()
    transfer.committed(computed=False)
    assert not rooms.asked, "it has only just joined, and has enough to do"
    transfer.committed(computed=True)
    transfer.committed(computed=True)
    assert len(rooms.asked) == 1
    assert 3 * GIB < rooms.asked[0] < 3.1 * GIB, "half of it: there will be two donors"


def test_elsewhere_it_is_made_when_somebody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_device, spare in ((False, True), (True, False)):
        monkeypatch.setattr(state_transfer, "can_wait_there", lambda size, spare=spare: spare)
        rooms = Rooms()
        transfer = healing_of(rooms, on_device=on_device)
        transfer.measure()
        transfer.committed(computed=True)
        assert not rooms.asked
        cast(Any, transfer)._participant.ledger.members = ("a", "b")
        transfer.settled(cast(Any, SimpleNamespace(idle=(), joiners=())))
        assert len(rooms.asked) == 1
