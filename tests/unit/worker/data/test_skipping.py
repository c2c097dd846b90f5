"""Data of some steps is left out after a roll-back."""

from __future__ import annotations

from craft.worker.data.skipping import SkippingSource
from craft.worker.data.source_args import make_source


def shifted(samples: int = 40, steps: int | None = 6, epochs: int | None = None) -> SkippingSource:
    source, total, _ = make_source(
        list(range(samples)),
        global_batch=4,
        microbatches=2,
        steps=steps,
        epochs=epochs,
        seed=0,
        shuffle=False,
        collate_fn=list,
        num_workers=0,
    )
    return SkippingSource(source, total, by_passes=steps is None)


def data(source: SkippingSource) -> list[list[int]]:
    assert source.total_steps is not None
    return [source.fetch(step, 0) + source.fetch(step, 1) for step in range(source.total_steps)]


def test_at_first_nothing_is_left_out() -> None:
    assert data(shifted())[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_number_of_steps_stays_what_it_was_and_takes_more_data() -> None:
    source = shifted()
    source.skip(2)
    assert source.total_steps == 6 and source.size_of(5) == 2 and source.size_of(6) == 0
    assert data(source)[0] == [8, 9, 10, 11] and data(source)[-1] == [28, 29, 30, 31]
    source.skip(3)
    assert data(source)[-1] == [32, 33, 34, 35]


def test_a_job_of_passes_ends_with_its_data() -> None:
    source = shifted(steps=None, epochs=1)
    assert source.total_steps == 10
    source.skip(3)
    assert source.total_steps == 7 and data(source)[-1] == [36, 37, 38, 39] and source.size_of(7) == 0
    assert source.epoch_of(0) == 0 and not source.more(7, 0)


def test_the_last_partial_batch_comes_where_the_data_ends() -> None:
    source = shifted(samples=10, steps=6)
    assert [source.size_of(step) for step in range(4)] == [2, 2, 2, 2]
    source.skip(1)
    assert source.fetch(1, 0) == [8] and source.weight(1, 0) == 1.0
