"""The arguments of ``job.steps``: what is taken over from a DataLoader, and what is refused with which sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from craft.protocol.errors import ConfigError
from craft.worker.data.source_args import check_start_step, make_source
from craft.worker.data.sources import MapSource, StreamSource

DATASET = list(range(20))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATASET)


def stream(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[int]:
    return iter(())


def make(data: Any = DATASET, **changes: Any) -> tuple[Any, int | None, dict[str, Any]]:
    arguments: dict[str, Any] = {
        "global_batch": None,
        "microbatches": 2,
        "steps": None,
        "epochs": None,
        "seed": 0,
        "shuffle": None,
        "collate_fn": None,
        "num_workers": None,
    }
    return make_source(data, **arguments | changes)


def samples(source: MapSource) -> list[int]:
    """The samples of the first step, as a list of numbers."""
    return [int(sample) for microbatch in range(source.size_of(0)) for sample in source.fetch(0, microbatch)]


def test_steps_and_epochs_give_the_number_of_steps() -> None:
    assert make(global_batch=8, steps=7)[1] == 7
    assert make(global_batch=8, epochs=2)[1] == 6
    assert make(stream)[1] is None
    assert make(stream, steps=4)[1] == 4


def test_a_dataset_is_shuffled_unless_it_is_not_to_be() -> None:
    assert samples(make(global_batch=20, steps=1)[0]) != DATASET
    assert samples(make(global_batch=20, steps=1, shuffle=False)[0]) == DATASET


def test_without_a_collate_function_samples_become_a_tensor() -> None:
    source = make(global_batch=4, steps=1, shuffle=False)[0]

    assert torch.equal(source.fetch(0, 0), torch.tensor([0, 1]))
    assert make(global_batch=4, steps=1, shuffle=False, collate_fn=sum)[0].fetch(0, 1) == 5


def test_a_stream_is_a_function() -> None:
    assert isinstance(make(stream)[0], StreamSource)


def test_a_loaders_batch_size_is_the_global_batch_and_its_other_settings_are_taken_over() -> None:
    loader = DataLoader(DATASET, batch_size=6, drop_last=True, collate_fn=tuple)  # type: ignore[arg-type, var-annotated]

    source, total, settings = make(loader, epochs=1)

    assert total == 3
    assert [source.fetch(0, microbatch) for microbatch in range(2)] == [(0, 1, 2), (3, 4, 5)]
    assert settings == {
        "microbatches": 2,
        "steps": None,
        "epochs": 1,
        "seed": 0,
        "global_batch": 6,
        "samples": 20,
        "shuffle": False,
        "drop_last": True,
    }


def test_arguments_of_steps_go_before_those_of_the_loader() -> None:
    loader = DataLoader(DATASET, batch_size=6, collate_fn=tuple)  # type: ignore[arg-type, var-annotated]

    source, total, settings = make(loader, epochs=1, global_batch=10, shuffle=True, collate_fn=list)

    assert (total, settings["global_batch"], settings["shuffle"]) == (2, 10, True)
    assert isinstance(source.fetch(0, 0), list)


@pytest.mark.parametrize(
    ("loader", "shuffled"),
    [
        (DataLoader(DATASET, batch_size=20), False),  # type: ignore[arg-type]
        (DataLoader(DATASET, batch_size=20, shuffle=True), True),  # type: ignore[arg-type]
        (DataLoader(DATASET, batch_size=20, sampler=SequentialSampler(DATASET)), False),  # type: ignore[arg-type]
        (DataLoader(DATASET, batch_size=20, sampler=RandomSampler(DATASET)), True),  # type: ignore[arg-type]
        (
            DataLoader(DATASET, batch_size=20, sampler=DistributedSampler(DATASET, 2, 0)),  # type: ignore[arg-type]
            True,
        ),
        (
            DataLoader(
                DATASET,  # type: ignore[arg-type]
                batch_size=20,
                sampler=DistributedSampler(DATASET, 2, 0, shuffle=False),  # type: ignore[arg-type]
            ),
            False,
        ),
        (
            DataLoader(DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET), 20, False)),  # type: ignore[arg-type]
            True,
        ),
    ],
)
def test_the_known_samplers_are_taken_over_as_shuffled_or_not(loader: DataLoader[int], shuffled: bool) -> None:
    source = make(loader, steps=1)[0]

    assert sorted(samples(source)) == DATASET
    assert (samples(source) != DATASET) == shuffled


def test_a_batch_sampler_gives_batch_size_and_drop_last() -> None:
    batches = BatchSampler(SequentialSampler(DATASET), 6, drop_last=True)

    assert make(DataLoader(DATASET, batch_sampler=batches), epochs=1)[1] == 3  # type: ignore[arg-type]


def number(name: str, value: object, least: int = 1) -> str:
    return f"job.steps({name}={value!r}): {name} is a whole number of at least {least}"


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no batch": (
        DATASET,
        {},
        "job.steps(global_batch=...) is missing: the number of samples in one step, over all workers",
    ),
    "no end": (DATASET, {"global_batch": 4}, "job.steps() needs steps=... or epochs=...: when is the job finished?"),
    "two ends": (
        DATASET,
        {"global_batch": 4, "steps": 1, "epochs": 1},
        "job.steps(steps=..., epochs=...): give one of them, not both",
    ),
    "batch of 0": (DATASET, {"global_batch": 0, "steps": 1}, number("global_batch", 0)),
    "batch of 2.5": (DATASET, {"global_batch": 2.5, "steps": 1}, number("global_batch", 2.5)),
    "negative steps": (DATASET, {"global_batch": 4, "steps": -1}, number("steps", -1)),
    "epochs yes": (DATASET, {"global_batch": 4, "epochs": True}, number("epochs", True)),
    "no microbatches": (DATASET, {"global_batch": 4, "steps": 1, "microbatches": 0}, number("microbatches", 0)),
    "negative workers": (DATASET, {"global_batch": 4, "steps": 1, "num_workers": -2}, number("num_workers", -2, 0)),
    "a word for a seed": (
        DATASET,
        {"global_batch": 4, "steps": 1, "seed": "x"},
        "job.steps(seed='x'): seed is a whole number",
    ),
    "no samples": ([], {"global_batch": 4, "steps": 1}, "the dataset has 0 samples: not enough for one step of 4"),
    "too few samples": (
        DataLoader(DATASET, batch_size=32, drop_last=True),  # type: ignore[arg-type]
        {"steps": 1},
        "the dataset has 20 samples: not enough for one step of 32",
    ),
    "no data": (
        7,
        {"global_batch": 4, "steps": 1},
        "job.steps(int): data is a dataset with __getitem__ and __len__, an IterableDataset, a DataLoader, or a function",
    ),
    "an iteration without a batch": (
        Endless(),
        {"steps": 1},
        "job.steps(global_batch=...) is missing: the number of samples in one step, over all workers",
    ),
    "an iteration in another order": (
        Endless(),
        {"global_batch": 4, "shuffle": True},
        "job.steps(shuffle=True) with an IterableDataset: its samples come in its own order; shuffle in its __iter__, from a"
        " seed that set_epoch(epoch) changes",
    ),
    "whole batches cut again": (
        DataLoader(Endless(), batch_size=None),
        {"global_batch": 4},
        "job.steps(global_batch=4) with a DataLoader that has batch_size=None: each item of its dataset is a microbatch, and"
        " a step has `microbatches` of them; leave global_batch out",
    ),
    "a batch sampler cut again": (
        DataLoader(DATASET, batch_sampler=[[0, 1]]),  # type: ignore[arg-type]
        {"global_batch": 4, "steps": 1},
        "the DataLoader has a list, whose batches are the global batches: leave global_batch and shuffle out",
    ),
    "a sampler that draws nothing": (
        DataLoader(DATASET, batch_size=4, sampler=[]),  # type: ignore[arg-type]
        {"steps": 1},
        "the sampler draws 0 samples: not enough for one step of 4",
    ),
    "a loader of batches": (
        DataLoader(DATASET, batch_size=None),  # type: ignore[arg-type]
        {"steps": 1, "global_batch": 4},
        "the DataLoader has batch_size=None, so that its dataset gives whole batches: pass a dataset of single samples,"
        " or a function stream(...), see job.steps",
    ),
    "a stream with passes": (
        stream,
        {"epochs": 1},
        "job.steps(epochs=...) with a stream: a stream has one pass; leave epochs out, or give steps",
    ),
    "a stream with loaders": (
        stream,
        {"num_workers": 2},
        "job.steps(collate_fn=..., num_workers=..., shuffle=...) with a stream: it gives whole microbatches, in its"
        " order and from any place; leave these out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_a_sentence(case: str) -> None:
    data, changes, sentence = REFUSED[case]

    with pytest.raises(ConfigError) as caught:
        make(data, **changes)

    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("start_step", "total", "sentence"),
    [
        (-1, 10, number("start_step", -1, 0)),
        (2.0, 10, number("start_step", 2.0, 0)),
        (
            11,
            10,
            "job.steps(start_step=11): the whole job has 10 steps. steps and epochs count from the beginning of the training,"
            " not from start_step",
        ),
    ],
)
def test_a_start_where_the_job_cannot_begin_is_refused(start_step: Any, total: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_start_step(start_step, total)
    assert str(caught.value) == sentence
    assert check_start_step(10, 10) == 10 and check_start_step(11, None) == 11
