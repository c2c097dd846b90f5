"""Up to which step the whole state was the same: never later than the first difference, and not much earlier."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.snapshots.state.leaves import STATE_IS_BUILT, Leaf, RotatingDigest
from craft.worker.monitor.consistency import AgreedStep


@given(
    num_bytes=st.integers(1, 40),
    slice_bytes=st.integers(1, 12),
    began=st.integers(0, 50),
    restarts=st.sets(st.integers(0, 120), max_size=3),
    data=st.data(),
)
def test_what_is_trusted_was_the_same_P3(
    num_bytes: int, slice_bytes: int, began: int, restarts: set[int], data: st.DataObject
) -> None:
    """Two workers, one of which has a byte flipped in the state of some step; all compare as ``ConsistencyCheck`` does."""
    flipped = data.draw(st.integers(began + 1, began + 100), label="flipped")
    position = data.draw(st.integers(0, num_bytes - 1), label="position")
    mine, other = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    digests = [RotatingDigest(slice_bytes), RotatingDigest(slice_bytes)]
    agreement = AgreedStep()
    agreement.begin(began)
    for digest in digests:
        digest.restart(began)
    last_restart = began
    for step in range(began, began + 300):
        if step in restarts:
            agreement.interrupt()
            last_restart = step
            for digest in digests:
                digest.restart(step)
        if step == flipped:
            other[position] ^= 1
        for digest, tensor in zip(digests, (mine, other), strict=True):
            if digest.due(step) and digest.refresh([Leaf("t", tensor)]) and digest is digests[0]:
                agreement.interrupt()
        if digests[0].take(step)() != digests[1].take(step)():
            break
        if digests[0].is_whole(step):
            agreement.compared(step, digests[0].period)
    period = digests[0].period
    assert flipped <= step < flipped + period
    assert agreement.step < flipped, "the state of that step may be polluted"
    if step - last_restart > STATE_IS_BUILT + period:
        assert agreement.step >= step - period - 1, "and no more is doubted than must be"


def test_who_joins_hears_it_from_the_others() -> None:
    agreement = AgreedStep()
    agreement.raise_to(35)
    agreement.raise_to(20)
    assert agreement.step == 35
    agreement.begin(10)
    assert agreement.step == 10, "all went back"
