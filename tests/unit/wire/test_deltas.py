from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from craft.protocol.errors import MalformedMessage
from craft.protocol.heartbeats import Update
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Directive
from craft.wire.codec import MAX_MESSAGE_BYTES, PACKED_FROM_BYTES, encode, pack, unpack
from craft.wire.deltas import difference, updated

members = st.lists(st.integers(0, 12), unique=True, max_size=10).map(
    lambda numbers: tuple(Member(worker_id=f"w{number}", store_port=number % 3) for number in numbers)
)
generations = st.none() | st.builds(Generation, number=st.integers(1, 4), nonce=st.sampled_from("xy"), members=members)
directives = st.builds(
    Directive,
    sequence=st.integers(0, 9),
    generation=generations,
    upcoming=generations,
    fenced=st.lists(st.sampled_from(["w1", "w2"]), max_size=2).map(tuple),
    stopping=st.booleans(),
)


def generation(number: int, *names: str) -> Generation:
    return Generation(number=number, nonce="x", members=tuple(Member(worker_id=name) for name in names))


@given(directives, directives)
def test_an_update_stands_for_the_whole_directive_wherever_it_can_be_said(old: Directive, new: Directive) -> None:
    update = difference(old, new)
    if update is not None and _names_differ(old, new):
        message = unpack(pack(update))
        assert isinstance(message, Update)
        assert updated(old, message) == new


def _names_differ(*directives: Directive) -> bool:
    """Two generations of one name are never different ones."""
    found = [
        each for directive in directives for each in (directive.generation, directive.upcoming) if each is not None
    ]
    return len({each.name for each in found}) == len(set(found))


def test_a_loss_among_thousands_is_a_small_message() -> None:
    names = [f"host{number // 8}-w{number % 8}" for number in range(8000)]
    old = Directive(sequence=1, generation=generation(1, *names))
    new = Directive(sequence=2, generation=generation(2, *(name for name in names if name != "host7-w3")))
    update = difference(old, new)
    assert update is not None
    assert len(encode(update)) < 500 < 300_000 < len(encode(new))
    assert updated(old, update) == new


def test_a_joiner_may_take_any_rank() -> None:
    old = Directive(sequence=1, generation=generation(1, "w0", "w1", "w2"))
    new = Directive(sequence=2, generation=generation(2, "w0", "w9", "w2"))
    update = difference(old, new)
    assert update is not None and update.generation is not None
    assert (update.generation.without, [rank for rank, _ in update.generation.placed]) == (("w1",), [1])
    assert updated(old, update) == new


def test_an_upcoming_generation_that_is_entered_is_not_said_again() -> None:
    old = Directive(sequence=1, generation=generation(1, "w0"), upcoming=generation(2, "w0", "w1"))
    new = Directive(sequence=2, generation=generation(2, "w0", "w1"))
    update = difference(old, new)
    assert update is not None and update.generation is not None
    assert (update.generation.base, update.generation.placed) == ("2-x", ())


def test_ranks_in_another_order_cannot_be_said_by_differences() -> None:
    old = Directive(sequence=1, generation=generation(1, "w0", "w1"))
    assert difference(old, Directive(sequence=2, generation=generation(2, "w1", "w0"))) is None


@pytest.mark.parametrize("old", [None, Directive(sequence=1), Directive(sequence=1, generation=generation(7, "w0"))])
def test_an_update_of_something_else_is_refused(old: Directive | None) -> None:
    base = Directive(sequence=1, generation=generation(1, "w0"))
    update = difference(base, replace(base, sequence=2))
    assert update is not None
    with pytest.raises(MalformedMessage, match="1-x"):
        updated(old, update)


def test_only_large_messages_are_packed() -> None:
    small = Directive(sequence=1, reason="x")
    large = Directive(sequence=1, reason="x" * PACKED_FROM_BYTES)
    assert isinstance(pack(small), str)
    assert len(pack(large)) < 1000
    assert (unpack(pack(small)), unpack(pack(large))) == (small, large)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        bytes(pack(Directive(sequence=1, reason="x" * PACKED_FROM_BYTES)))[:-3],  # type: ignore[arg-type]
        bytes(pack(Directive(sequence=1, reason="x" * PACKED_FROM_BYTES))) + b"more",  # type: ignore[arg-type]
        bytes(pack(Directive(sequence=1, reason="x" * (MAX_MESSAGE_BYTES + 1)))),  # type: ignore[arg-type]
    ],
)
def test_packed_rubbish_and_what_would_unpack_to_too_much_is_refused_P6(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack(data)
