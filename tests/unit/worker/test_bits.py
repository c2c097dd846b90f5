"""What is looked at to tell whether two workers have the same bits, and what is said when they do not."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from craft.decide.word import combine
from craft.protocol.errors import BitsDiffer, ConfigError
from craft.protocol.word import Word
from craft.worker.bits import check_bits, check_sample, sample_of
from craft.worker.gradients import Flats
from craft.worker.layout import Layout

LAYOUT = Layout([torch.nn.Parameter(torch.zeros(size)) for size in (100, 70_000, 3)], 1 << 16)


def flats(value: float) -> Flats:
    found = Flats(LAYOUT)
    for tensor in found.tensors:
        tensor.fill_(value)
    return found


def test_a_sample_shows_what_is_other_all_over_in_any_bucket() -> None:
    assert sample_of(flats(1.0)) == sample_of(flats(1.0)) != sample_of(flats(-1.0))
    for bucket in range(len(LAYOUT.buckets)):
        other = flats(1.0)
        other.tensors[bucket].mul_(1.0000001)
        assert sample_of(other) != sample_of(flats(1.0))


def test_only_a_joiner_that_has_other_bits_is_kept_out() -> None:
    combined = combine([Word(step=7), Word(step=7, sample=b"theirs")])
    check_sample(b"theirs", combined)
    check_sample(b"", combined)
    check_sample(b"own", replace(combined, sample=b""))
    with pytest.raises(ConfigError, match=r"microbatch 0 of step 7 .*register_state"):
        check_sample(b"own", combined)


@pytest.mark.parametrize(
    ("compared", "told"), [("ab", "a, b"), ("abcd", "a, b, c, d"), ("abcdef", "a, b, c, d or 2 more")]
)
def test_how_much_of_the_state_was_compared_is_said_beside_the_first_names(compared: str, told: str) -> None:
    combined = combine([Word(step=7, digest=digest) for digest in (b"1", b"2", b"1")])

    with pytest.raises(BitsDiffer) as caught:
        check_bits(combined, ("w0", "w1", "w2"), lambda _: list(compared))

    assert f"after 7 steps the state differs between w0, w2 | w1 (in or near {told}):" in str(caught.value)
