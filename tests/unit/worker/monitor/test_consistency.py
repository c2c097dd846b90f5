"""What is looked at to tell whether two workers have the same bits, and what is said when they do not."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from craft.decide.step.combine import combine
from craft.decide.step.ledger import Ledger
from craft.protocol.control_word import Word
from craft.protocol.errors import BitsDiffer, ConfigError
from craft.snapshots.state.leaves import Leaf
from craft.worker.monitor.consistency import ConsistencyCheck, hash_of, sample_of
from craft.worker.monitor.consistency_errors import check_bits, check_sample
from craft.worker.monitor.repeated_microbatch import PROBE
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.flats import Flats
from craft.worker.reduce.word_parts import ConsistencyPart

OWNER = Ledger(worker_id="w0", members=("w0", "w1"), owners=(0, 1))
OTHER = replace(OWNER, worker_id="w1")
LAYOUT = BucketLayout([torch.nn.Parameter(torch.zeros(size)) for size in (100, 70_000, 3)], 1 << 16)


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
    theirs = combine([Word(step=7), Word(step=7, sample=b"theirs")]).sample
    check_sample(b"theirs", theirs, 7)
    check_sample(b"", theirs, 7)
    check_sample(b"own", b"", 7)
    with pytest.raises(ConfigError, match=r"microbatch 0 of step 7 .*register_state"):
        check_sample(b"own", theirs, 7)


@pytest.mark.parametrize(
    ("compared", "told"), [("ab", "a, b"), ("abcd", "a, b, c, d"), ("abcdef", "a, b, c, d or 2 more")]
)
def test_how_much_of_the_state_was_compared_is_said_beside_the_first_names(compared: str, told: str) -> None:
    combined = combine([Word(step=7, digest=digest) for digest in (b"1", b"2", b"1")])

    with pytest.raises(BitsDiffer) as caught:
        check_bits(combined, ("w0", "w1", "w2"), lambda _: list(compared), str)

    assert f"after 7 steps the state differs between w0, w2 | w1 (in or near {told}):" in str(caught.value)


def test_in_the_first_step_everybody_computes_microbatch_0_and_later_nobody_else_does() -> None:
    bits = ConsistencyCheck(True, 0, list)

    assert bits.probe_due(OTHER) and not bits.probe_due(OWNER)
    assert not bits.probe_due(replace(OTHER, members=("w1",)))
    assert bits.hasher(PROBE, OTHER) is bits.hasher(0, OWNER) is hash_of
    bits.found(PROBE, hash_of, b"probe")
    assert not bits.probe_due(OTHER) and bits.word_part().probe == b"probe"

    bits.committed()
    assert not bits.probe_due(OTHER) and bits.word_part() == ConsistencyPart()


def test_a_sample_is_taken_only_while_somebody_catches_up() -> None:
    bits = ConsistencyCheck(True, 0, list)
    bits.committed()

    assert bits.hasher(0, OWNER) is None
    assert bits.hasher(0, replace(OWNER, idle=frozenset({"w1"}))) is sample_of
    assert bits.hasher(1, replace(OWNER, idle=frozenset({"w1"}))) is None
    assert bits.hasher(PROBE, OTHER) is sample_of


def test_a_joiner_compares_its_sample_once() -> None:
    bits = ConsistencyCheck(True, 0, list)
    combined = combine([Word(step=7, sample=b"theirs")])
    bits.found(PROBE, sample_of, b"own")

    with pytest.raises(ConfigError):
        bits.check_replayed(combined)
    bits.check_replayed(combined)


def test_without_the_check_nothing_of_a_gradient_is_hashed() -> None:
    bits = ConsistencyCheck(False, 0, list)

    assert not bits.probe_due(OTHER)
    assert bits.hasher(0, replace(OWNER, idle=frozenset({"w1"}))) is bits.hasher(PROBE, OTHER) is None


def test_what_is_told_of_the_state_is_as_it_was_before_forward_changed_it() -> None:
    tensor = torch.zeros(4)
    bits = ConsistencyCheck(False, 1 << 10, lambda: [Leaf("a", tensor)])
    bits.begin_step(0)
    before = bits.word_part().digest
    tensor.fill_(1.0)
    assert bits.word_part().digest == before != b""

    bits.regrouped()
    assert bits.word_part().digest == b""
    bits.begin_step(0)
    assert bits.word_part().digest not in (before, b"")
