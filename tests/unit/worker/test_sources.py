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
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from craft.protocol.errors import ConfigError
from craft.worker.data import MapSource, StreamSource
from craft.worker.sources import make_source

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


class OwnBatches(BatchSampler):
    pass


SAMPLERS = [
    SubsetRandomSampler([1, 2, 3]),
    WeightedRandomSampler([1.0] * 20, 20),
    RandomSampler(DATASET, replacement=True),
    RandomSampler(DATASET, num_samples=5),
    [3, 1, 2],
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_a_sampler_with_an_order_of_its_own_is_refused(sampler: Any) -> None:
    loader = DataLoader(DATASET, batch_size=4, sampler=sampler)  # type: ignore[arg-type, var-annotated]

    with pytest.raises(ConfigError) as caught:
        make(loader, steps=1)

    assert str(caught.value) == (
        f"the DataLoader has a {type(sampler).__qualname__}, whose order CRAFT cannot take over: pass its dataset to"
        " job.steps, with shuffle=True or shuffle=False (torch.utils.data.Subset leaves samples out)"
    )


@pytest.mark.parametrize("batches", [[[0, 1], [2]], OwnBatches(SequentialSampler(DATASET), 4, False)])
def test_a_batch_sampler_with_batches_of_its_own_is_refused(batches: Any) -> None:
    with pytest.raises(ConfigError, match="whose order CRAFT cannot take over"):
        make(DataLoader(DATASET, batch_sampler=batches), steps=1)  # type: ignore[arg-type]


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
        "job.steps(int): data is a dataset with __getitem__ and __len__, a DataLoader, or a function",
    ),
    "samples without numbers": (
        Endless(),
        {"global_batch": 4, "steps": 1},
        "an IterableDataset has no samples by number: pass a function stream(microbatch, num_microbatches, start_step)"
        " that returns an iterator over the batches of one microbatch",
    ),
    "a loader of such": (
        DataLoader(Endless()),
        {"steps": 1},
        "the DataLoader has an IterableDataset: pass a function stream(...) instead, see job.steps",
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
        "job.steps(collate_fn=..., num_workers=..., shuffle=...) with a stream: it gives whole microbatches, in its own"
        " order and from where it likes; leave these out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_a_sentence(case: str) -> None:
    data, changes, sentence = REFUSED[case]

    with pytest.raises(ConfigError) as caught:
        make(data, **changes)

    assert str(caught.value) == sentence
