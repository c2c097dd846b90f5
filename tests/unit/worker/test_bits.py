"""What is said when workers have different bits."""

from __future__ import annotations

import pytest

from craft.decide.word import combine
from craft.protocol.errors import BitsDiffer
from craft.protocol.word import Word
from craft.worker.bits import check_bits


@pytest.mark.parametrize(
    ("compared", "told"), [("ab", "a, b"), ("abcd", "a, b, c, d"), ("abcdef", "a, b, c, d or 2 more")]
)
def test_how_much_of_the_state_was_compared_is_said_beside_the_first_names(compared: str, told: str) -> None:
    combined = combine([Word(step=7, digest=digest) for digest in (b"1", b"2", b"1")])

    with pytest.raises(BitsDiffer) as caught:
        check_bits(combined, ("w0", "w1", "w2"), lambda _: list(compared))

    assert f"after 7 steps the state differs between w0, w2 | w1 (in or near {told}):" in str(caught.value)
