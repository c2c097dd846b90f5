"""The row of bytes of a state is cut the same way everywhere, and its chunks are shared evenly."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from craft.snapshots.checkpoint.chunking import CHUNK_BYTES, LARGE_BYTES, PACK_BYTES, assign, cut
from craft.snapshots.state.index import ByteLayout, TensorEntry, item_bytes
from craft.snapshots.state.raw_memory import DTYPES

sizes = st.one_of(
    st.integers(0, 100), st.integers(LARGE_BYTES - 2, LARGE_BYTES + 2), st.integers(PACK_BYTES, 3 * CHUNK_BYTES)
)


def entries_of(numbers: list[int]) -> list[TensorEntry]:
    return [TensorEntry(f"t{index}", "uint8", (number,), (1,)) for index, number in enumerate(numbers)]


def test_size_of_an_element_is_in_the_name_of_every_dtype() -> None:
    assert {name: item_bytes(name) for name in DTYPES} == {name: dtype.itemsize for name, dtype in DTYPES.items()}


@given(st.lists(sizes, max_size=40))
def test_chunks_are_every_byte_once(numbers: list[int]) -> None:
    chunks = cut(entries_of(numbers))
    ranges = sorted(each for chunk in chunks for each in chunk.ranges)
    assert all(chunk.size == sum(end - begin for begin, end in chunk.ranges) > 0 for chunk in chunks)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert sum(chunk.size for chunk in chunks) == sum(numbers) == (ranges[-1][1] if ranges else 0)


@given(st.lists(sizes, max_size=40))
def test_large_tensors_have_chunks_of_their_own(numbers: list[int]) -> None:
    layout = ByteLayout(entries_of(numbers))
    for chunk in cut(entries_of(numbers)):
        owners = [index for begin, end in chunk.ranges for index, _, _ in layout.pieces(begin, end)]
        large = [index for index in owners if numbers[index] >= LARGE_BYTES]
        assert chunk.size <= (CHUNK_BYTES if large else PACK_BYTES)
        assert not large or len(owners) == 1


def test_a_tensor_that_grows_changes_no_chunk_of_the_others() -> None:
    before, after = ([LARGE_BYTES, size, 3 * CHUNK_BYTES] for size in (LARGE_BYTES, CHUNK_BYTES + 1))
    assert [chunk.size for chunk in cut(entries_of(before))] == [LARGE_BYTES, LARGE_BYTES, *[CHUNK_BYTES] * 3]
    assert [chunk.size for chunk in cut(entries_of(after))] == [LARGE_BYTES, CHUNK_BYTES, 1, *[CHUNK_BYTES] * 3]


@given(st.lists(sizes, max_size=40), st.integers(1, 9))
def test_each_chunk_is_written_by_one_member_and_every_stretch_is_shared_evenly(numbers: list[int], of: int) -> None:
    chunks = cut(entries_of(numbers))
    shares = assign(chunks, of)
    assert sorted(number for share in shares for number in share) == list(range(len(chunks)))
    for begin, end in itertools.combinations(range(0, len(chunks) + 1, 3), 2):
        stretch = range(begin, end)
        loads = [sum(chunks[number].size for number in share if number in stretch) for share in shares]
        assert max(loads) - min(loads) <= 2 * CHUNK_BYTES
