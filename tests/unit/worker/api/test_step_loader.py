"""One item per optimizer step, in the place of the script's own loader."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from craft.protocol.errors import ConfigError
from craft.worker.api.step_loader import StepLoader

SAMPLES = TensorDataset(torch.zeros(100, 2))


def test_a_step_has_as_many_batches_of_the_script_as_there_are_microbatches() -> None:
    loader = StepLoader(DataLoader(SAMPLES, batch_size=4), microbatches=8, asked_by="Loop")
    assert loader.global_batch == 32
    assert [len(loader), *(loader.samples(position) for position in range(4))] == [4, 32, 32, 32, 4]


def test_what_the_script_drops_at_the_end_of_a_pass_is_dropped_by_steps() -> None:
    assert len(StepLoader(DataLoader(SAMPLES, batch_size=4, drop_last=True), microbatches=8, asked_by="Loop")) == 3


def test_before_the_job_has_begun_there_is_no_step() -> None:
    assert list(StepLoader(DataLoader(SAMPLES, batch_size=4), microbatches=8, asked_by="Loop")) == []


@pytest.mark.parametrize("data", [[1, 2], DataLoader(SAMPLES, batch_size=None)])
def test_what_has_no_batches_to_make_steps_of_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match="Loop needs a"):
        StepLoader(data, microbatches=2, asked_by="Loop")


def test_a_sampler_that_draws_fewer_samples_makes_shorter_passes() -> None:
    batches = DataLoader(SAMPLES, batch_size=4, sampler=SubsetRandomSampler(range(70)))
    loader = StepLoader(batches, microbatches=8, asked_by="Loop")
    assert [len(loader), *(loader.samples(position) for position in range(3))] == [3, 32, 32, 6]
