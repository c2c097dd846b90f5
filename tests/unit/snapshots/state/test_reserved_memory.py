"""Memory that is set aside before it is needed."""

from __future__ import annotations

from craft.snapshots.state.reserved_memory import can_wait_there


def test_little_may_be_set_aside_just_in_case_and_much_may_not() -> None:
    assert can_wait_there(1 << 20)
    assert not can_wait_there(1 << 60)
