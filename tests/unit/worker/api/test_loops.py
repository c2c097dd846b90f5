"""The loops of a script, alone in this process: epochs, several loops, what is done before and after them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

from craft.protocol.errors import ConfigError
from craft.settings.rundir import RunDir
from craft.worker.api.adapter_access import finish
from craft.worker.api.evaluation import Batches
from craft.worker.api.job import Job

from ..alone import Batch, alone, dataset, loss_of, model, train


def job_of(net: torch.nn.Module) -> Job:
    job = alone()
    job.replicate(net)
    return job


def test_epochs_end_with_the_data_and_code_after_one_runs_once() -> None:
    net = model()
    job, seen = job_of(net), []
    for epoch in job.epochs(2, dataset(10), global_batch=4, microbatches=2):
        numbers = []
        for step in epoch:
            for batch in step:
                train(net, batch)
            numbers.append((step.number, step.last_of_epoch))
        seen.append((epoch.number, numbers, job.step))

    assert seen == [
        (0, [(0, False), (1, False), (2, True)], 3),
        (1, [(3, False), (4, False), (5, True)], 6),
    ]


def test_an_epoch_that_is_left_in_the_middle_is_refused() -> None:
    net = model()
    job = job_of(net)

    def run() -> None:
        for epoch in job.epochs(2, dataset(12), global_batch=4, microbatches=2):
            for step in epoch:
                for batch in step:
                    train(net, batch)
                if step.number == 1:
                    break

    with pytest.raises(ConfigError, match=r"epoch 0 was left after step 1, before its end.*steps_per_epoch"):
        run()


@pytest.mark.parametrize("taken", ["steps", "epochs"])
def test_epochs_are_counted_by_their_first_argument(taken: str) -> None:
    job = job_of(model())
    with pytest.raises(ConfigError, match="n is the number of passes"):
        job.epochs(2, dataset(8), global_batch=4, **{taken: 3})


def test_step_numbers_run_on_over_several_loops_and_data_begins_anew() -> None:
    net, head = model(), torch.nn.Linear(3, 1)
    job = job_of(net)
    for step in job.steps(dataset(8), global_batch=4, microbatches=2, epochs=1, shuffle=False):
        for batch in step:
            train(net, batch)
    assert job.step == 2

    job.replicate(head)
    seen = []
    data = [(index, *sample) for index, sample in enumerate(dataset(8))]
    for step in job.steps(data, global_batch=4, microbatches=2, epochs=1, shuffle=False):
        samples = []
        for index, x, _ in step:
            samples += index.tolist()
            head(x).sum().backward()
        seen.append((step.number, job.epoch, samples))
    assert [number for number, _, _ in seen] == [2, 3]
    assert [samples for _, _, samples in seen] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert job.step == 4


def test_a_loop_that_is_left_by_break_is_over_when_the_script_goes_on() -> None:
    net = model()
    job = job_of(net)
    for step in job.steps(dataset(8), global_batch=4, microbatches=2, steps=50):
        for batch in step:
            train(net, batch)
        if step.number == 2:
            break
    with pytest.raises(ConfigError, match="after the loop"):
        job.checkpoint()
    assert job.once("name", lambda: {"steps": job.step}) == {"steps": 3}
    for step in job.steps(dataset(8), global_batch=4, microbatches=2, steps=1):
        for batch in step:
            train(net, batch)
        assert step.number == 3
    finish(job)


def test_in_a_loop_nothing_can_be_registered_and_no_other_loop_begun() -> None:
    net = model()
    job = job_of(net)

    def run() -> None:
        for step in job.steps(dataset(8), global_batch=4, microbatches=2, steps=2):
            for batch in step:
                train(net, batch)
            job.steps(dataset(8), global_batch=4, steps=1)

    with pytest.raises(ConfigError, match=r"job.steps\(\) in the loop"):
        run()


def test_one_worker_does_it_once_wherever_it_is_asked() -> None:
    net = model()
    job, done = alone(), []

    def work() -> int:
        done.append(job.step)
        return len(done)

    assert job.once("before", work) == 1
    job.replicate(net)
    for step in job.steps(dataset(8), global_batch=4, microbatches=2, steps=2):
        assert job.once("ahead", work) == 2 + 2 * step.number
        for batch in step:
            train(net, batch)
        assert job.once("between", work) == 3 + 2 * step.number
    assert job.once("after", work) == 6
    assert done == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ConfigError, match="fn returned a Linear"):
        job.once("model", lambda: torch.nn.Linear(1, 1))


def test_in_the_inner_loop_nothing_is_asked_of_all_workers() -> None:
    job = job_of(model())

    def run() -> None:
        for step in job.steps(dataset(8), global_batch=4, microbatches=2, steps=2):
            for _ in step:
                job.once("name", lambda: None)

    with pytest.raises(ConfigError, match="within the inner loop"):
        run()


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_an_evaluation_takes_a_loader_before_and_after_the_loop(loader_processes: int) -> None:
    net, data = model(), dataset(10)
    job = job_of(net)

    def score(batch: Batch) -> dict[str, float]:
        return {"loss": float(loss_of(net, batch)), "samples": float(len(batch[0]))}

    loader: DataLoader[Batch] = DataLoader(data, batch_size=4, num_workers=loader_processes)  # type: ignore[arg-type]
    for step in job.steps(data, global_batch=4, microbatches=2, steps=1):
        before = job.evaluate(loader, score)
        assert before == job.evaluate(data, score, batch_size=4)
        for batch in step:
            train(net, batch)
    assert job.evaluate(loader, score) == before
    assert before["samples"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)
    with pytest.raises(ConfigError, match="the loader has its own"):
        job.evaluate(loader, score, batch_size=2)


def test_an_evaluation_scores_every_sample_of_a_loader_that_shards_by_rank() -> None:
    data, seen = dataset(10), []
    sampler: DistributedSampler[Batch] = DistributedSampler(data, num_replicas=2, rank=1)  # type: ignore[arg-type]
    loader: DataLoader[Batch] = DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]

    def score(batch: Batch) -> dict[str, float]:
        seen.extend(batch[1].flatten().tolist())
        return {}

    job = job_of(model())
    for step in job.steps(data, global_batch=4, steps=1):
        job.evaluate(loader, score)
        list(step)
    assert seen == [y.item() for _, y in data]


def test_what_an_evaluation_draws_does_not_depend_on_earlier_draws_of_its_generator() -> None:
    """P1: a worker that joined has made fewer of them than the others."""
    data = dataset(10)
    generator = torch.Generator().manual_seed(5)
    loader: DataLoader[Batch] = DataLoader(data, batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
    drawn: list[list[float]] = []

    def score(batch: Batch) -> dict[str, float]:
        drawn[-1] += batch[1].flatten().tolist()
        return {}

    job = job_of(model())
    for step in job.steps(data, global_batch=4, steps=1):
        for _ in range(2):
            drawn.append([])
            torch.rand(1, generator=generator)
            before = generator.get_state()
            job.evaluate(loader, score)
            assert torch.equal(generator.get_state(), before)
        list(step)
    assert drawn[0] == drawn[1] != [y.item() for _, y in data]


def test_parts_of_a_dataset_are_told_apart_by_the_samples_that_they_have() -> None:
    data = dataset(12)
    parts = [Batches(Subset(data, range(rank, 12, 2)), 4, None) for rank in (0, 0, 1)]  # type: ignore[arg-type]
    first, same, other = (part.digest() for part in parts)
    assert first == same != other


def test_steps_and_pauses_do_not_read_a_clock_that_the_script_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of scripts replace ``time.monotonic`` by a clock that moves with each call: only the script's calls may count."""
    real, reads = time.monotonic, []
    me = threading.current_thread()

    def read() -> float:
        if threading.current_thread() is me:
            reads.append(1)
        return real()

    net = model()
    job = alone(run_dir=RunDir(tmp_path).create().path)
    job.replicate(net)
    monkeypatch.setattr(time, "monotonic", read)
    for step in job.steps(dataset(8), global_batch=4, microbatches=2, steps=4):
        for batch in step:
            train(net, batch)
        with job.paused("validation"):
            pass
    finish(job)

    assert not reads
