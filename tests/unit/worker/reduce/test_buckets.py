"""Where each parameter lies in the flat buckets, and who sums which chunk."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.worker.reduce.buckets import Bucket, BucketLayout


def params(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


@given(numel=st.integers(0, 500), size=st.integers(1, 20))
def test_chunks_are_the_whole_bucket_side_by_side_and_begin_aligned(numel: int, size: int) -> None:
    bucket = Bucket(0, [(0, params(numel)[0])])

    chunks = [bucket.chunk(rank, size) for rank in range(size)]

    assert [index for chunk in chunks for index in range(numel)[chunk]] == list(range(numel))
    assert all(chunk.start % 16 == 0 or chunk.start == numel for chunk in chunks)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    limit=st.integers(1, 400),
    kinds=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=20, max_size=20),
    frozen=st.sets(st.integers(0, 19)),
)
def test_every_trainable_parameter_has_one_place_in_a_bucket_of_its_type(
    sizes: list[int], limit: int, kinds: list[torch.dtype], frozen: set[int]
) -> None:
    given_params = [params(size, dtype=kind)[0] for size, kind in zip(sizes, kinds, strict=False)]
    for index in frozen & set(range(len(given_params))):
        given_params[index].requires_grad_(False)

    layout = BucketLayout(given_params, limit)

    places = {
        index: (bucket.index, position)
        for bucket in layout.buckets
        for position, index in enumerate(bucket.param_indices)
    }
    assert places == layout.place
    assert set(places) == {index for index in range(len(sizes)) if index not in frozen}
    for bucket in layout.buckets:
        assert {param.dtype for param in bucket.params} == {bucket.dtype}
        assert bucket.param_indices == sorted(bucket.param_indices, reverse=True)
        num_bytes = [param.numel() * param.element_size() for param in bucket.params]
        assert len(num_bytes) == 1 or sum(num_bytes) <= limit
        assert bucket.numel == sum(param.numel() for param in bucket.params)


def test_the_first_bucket_is_small_so_that_the_exchange_begins_early() -> None:
    megabyte = 1 << 18

    layout = BucketLayout(params(*[megabyte] * 6), 100 << 20)

    assert [len(bucket.params) for bucket in layout.buckets] == [1, 5]


def test_views_are_the_parameters_places_in_their_shapes() -> None:
    one, two = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))
    bucket = Bucket(0, [(1, two), (0, one)])
    flat = torch.arange(10.0)

    views = bucket.views(flat)

    assert [view.tolist() for view in views] == [[0, 1, 2, 3], [[4, 5, 6], [7, 8, 9]]]
    views[0][0] = -1
    assert flat[0] == -1


def test_a_layout_fits_until_a_parameter_is_frozen_or_unfrozen() -> None:
    given_params = params(2, 2)
    layout = BucketLayout(given_params, 1024)
    assert layout.fits()

    given_params[0].requires_grad_(False)

    assert not layout.fits()


def test_a_model_that_is_frozen_altogether_has_no_buckets() -> None:
    frozen = params(2, 2)
    for param in frozen:
        param.requires_grad_(False)

    assert BucketLayout(frozen, 1024).buckets == []
