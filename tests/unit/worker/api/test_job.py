"""The script's side of a job, alone in this process: what the loop gives."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed

from craft.protocol import events
from craft.worker.api.steps import said_aside, say_aside

from ..alone import Batch, alone, dataset, grads, loss_of, model, train


@pytest.mark.parametrize(("global_batch", "microbatches"), [(8, 1), (8, 4), (8, 3), (7, 5), (3, 8)])
def test_the_gradient_is_the_mean_over_the_global_batch(global_batch: int, microbatches: int) -> None:
    """As of one big batch in plain PyTorch, also where microbatches are uneven and for the last, partial batch."""
    data, net, plain = dataset(18), model(), model()
    # Without the microbatch that is computed twice to compare its bits.
    job = alone(check_bits=False)
    job.replicate(net)
    seen: list[list[int]] = []

    for step in job.steps(
        [(index, *sample) for index, sample in enumerate(data)],
        global_batch=global_batch,
        microbatches=microbatches,
        epochs=1,
    ):
        indices = []
        for index, x, y in step:
            indices += index.tolist()
            train(net, (x, y))
        seen.append(indices)
        plain.zero_grad()
        inputs, targets = (torch.stack(column) for column in zip(*(data[index] for index in indices), strict=True))
        train(plain, (inputs, targets))
        for found, expected in zip(grads(net), grads(plain), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

    assert sorted(itertools.chain.from_iterable(seen)) == list(range(18))
    assert [len(indices) for indices in seen[:-1]] == [global_batch] * (len(seen) - 1)


def test_weighed_by_tokens_the_gradient_is_the_mean_over_all_tokens() -> None:
    """Sentences of different lengths, each microbatch a mean over its own tokens: all tokens count the same."""
    lengths = [5, 1, 2, 7, 3, 4, 6, 1]
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(length, 3, generator=generator) for length in lengths]
    net, plain = model(), model()
    job = alone()
    job.replicate(net)

    for step in job.steps(data, global_batch=8, microbatches=3, steps=1, collate_fn=torch.cat):
        for tokens in step:
            step.weight(len(tokens))
            loss = net(tokens).square().mean()
            loss.backward()
            step.log(loss=loss)
    whole = plain(torch.cat(data)).square().mean()
    whole.backward()

    assert step.metrics["loss"] == pytest.approx(whole.item())
    for found, expected in zip(grads(net), grads(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("light", [(3,), (1,), (0, 1, 2, 3)], ids=["last", "middle", "all"])
def test_a_step_of_weight_0_is_a_step_like_any_other(light: tuple[int, ...]) -> None:
    """As of tokens that are all masked: its gradient is zero, and what was logged is there."""
    net = model()
    job = alone(check_bits=False)
    job.replicate(net)
    found: list[bool] = []

    for step in job.steps(dataset(16), global_batch=4, microbatches=2, steps=4):
        for batch in step:
            step.weight(0 if step.number in light else 1)
            loss = loss_of(net, batch) * (float("nan") if step.number in light else 1.0)
            loss.backward()
            step.log(loss=loss, three=3)
        found.append(any(bool(grad.any()) for grad in grads(net)))
        assert len(grads(net)) == 4
        assert step.metrics["three"] == 3.0

    assert job.step == 4
    assert found == [number not in light for number in range(4)]


def test_weights_go_with_parameters_that_are_used_only_in_some_microbatches() -> None:
    branches = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
    net = torch.nn.ModuleList(branches)
    job = alone()
    job.replicate(net)

    for step in job.steps(list(range(6)), global_batch=6, microbatches=6, steps=2, shuffle=False):
        for index in step:
            step.weight(float(index + 1))
            branches[int(index) % 2](torch.ones(1, 1)).sum().backward()
        found = [None if branch.weight.grad is None else branch.weight.grad.item() for branch in branches]
        assert found == [pytest.approx(9 / 21), pytest.approx(12 / 21), None]


def test_metrics_are_means_over_the_samples() -> None:
    job = alone()
    job.replicate(model())

    for step in job.steps(list(range(7)), global_batch=7, microbatches=3, steps=1, shuffle=False):
        for batch in step:
            step.log(mean=batch.float().mean(), constant=2.0)

    assert step.metrics == {"constant": pytest.approx(2.0), "mean": pytest.approx(3.0)}


def test_what_an_adapter_says_of_a_microbatch_is_beside_the_metrics_of_its_step() -> None:
    job = alone()
    job.replicate(model())
    found = []

    for step in job.steps(list(range(8)), global_batch=4, microbatches=2, steps=2, shuffle=False):
        for index in step:
            step.log(mean=index.float().mean())
            if 3 in index:
                say_aside(step, "a three")
        found.append((said_aside(step), sorted(step.metrics)))

    assert found == [(("a three",), ["mean"]), ((), ["mean"])]


@pytest.mark.parametrize("when", ["before the inner loop", "after it"])
def test_parameters_may_be_unfrozen_anywhere_between_the_steps(when: str) -> None:
    """From the next inner loop on they get the mean over the global batch like all others."""
    data, net, plain = dataset(8), model(), model()
    net[0].requires_grad_(False)
    job = alone()
    job.replicate(net)
    train(plain, tuple(torch.stack(column) for column in zip(*data, strict=True)))

    counts = []
    for step in job.steps(data, global_batch=8, microbatches=4, steps=4):
        if when == "before the inner loop" and step.number == 2:
            net[0].requires_grad_(True)
        for batch in step:
            train(net, batch)
        counts.append(len(grads(net)))
        if when == "after it" and step.number == 1:
            net[0].requires_grad_(True)

    assert counts == [2, 2, 4, 4]
    for found, expected in zip(grads(net), grads(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_what_update_code_makes_of_a_buffer_stays() -> None:
    net, mask = model(), torch.zeros(2)
    net.register_buffer("mask", mask)
    job = alone()
    job.replicate(net)

    seen = []
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=3):
        for batch in step:
            seen.append(mask.tolist())
            train(net, batch)
        mask.add_(1)

    assert seen == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]


def test_a_model_that_is_frozen_altogether_still_steps() -> None:
    net = model().requires_grad_(False)
    job = alone()
    job.replicate(net)

    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        for batch in step:
            step.log(loss=loss_of(net, batch))

    assert job.step == 2
    assert step.metrics["loss"] > 0


def test_a_job_alone_knows_its_place() -> None:
    job = alone(local_rank=0)
    job.replicate(model())
    assert (job.rank, job.world_size, job.local_rank, job.replica_rank, job.num_replicas) == (0, 1, 0, 0, 1)
    assert (job.is_leader, job.worker_id, job.generation, job.branch) == (True, "w0", 1, 0)
    assert (job.step, job.epoch) == (0, 0)
    places = []

    for step in job.steps(dataset(8), global_batch=3, epochs=2):
        places.append((step.number, job.step, job.epoch))
        for _ in step:
            pass

    assert places == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 3, 1), (4, 4, 1), (5, 5, 1)]
    assert job.step == 6


def test_random_numbers_of_compute_and_update_depend_on_the_place_alone() -> None:
    def numbers(disturb: bool) -> list[float]:
        job = alone()
        job.replicate(model())
        found = []
        for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=3, seed=9):
            for _ in step:
                found.append(torch.rand(1).item())
                if disturb:
                    torch.rand(7)
            found.append(torch.rand(1).item())
        return found

    calm = numbers(False)

    assert numbers(True) == calm
    assert len(set(calm)) == 9


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_stop_ends_the_loop_after_the_step_in_flight_or_the_next_one(where: str) -> None:
    job = alone()
    job.replicate(model())
    stops: list[events.StopRequested] = []
    job.on(events.StopRequested, stops.append)

    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=100):
        for _ in step:
            if step.number == 3 and where == "inside":
                job.stop("good enough")
        if step.number == 3 and where == "outside":
            job.stop("good enough")

    assert job.step == (4 if where == "inside" else 5)
    assert [event.reason for event in stops] == ["good enough"]


def test_after_the_loop_the_model_is_the_scripts_own_again() -> None:
    net = model()
    job = alone()
    job.replicate(net)
    for step in job.steps(dataset(4), global_batch=4, steps=1):
        for batch in step:
            train(net, batch)
    net.zero_grad()

    train(net, tuple(torch.stack(column) for column in zip(*dataset(4), strict=True)))

    assert len(grads(net)) == 4


def test_the_same_model_and_the_same_object_may_be_given_twice() -> None:
    job, net = alone(), model()
    optimizer = torch.optim.SGD(net.parameters())

    assert job.replicate(job.replicate(net)) is net
    job.register(optimizer=optimizer)
    job.register(optimizer=optimizer)


def test_what_is_drawn_before_the_inner_loop_depends_on_the_step_alone() -> None:
    """P1: one that joins, or goes on from a checkpoint, has drawn other numbers until then than the others have."""

    def drawn(others: int) -> list[tuple[float, float]]:
        net, found = model(), []
        job = alone()
        job.replicate(net)
        torch.rand(others)
        for step in job.steps(dataset(8), global_batch=4, steps=4):
            found.append((torch.rand(()).item(), random.random()))
            for batch in step:
                train(net, batch)
            torch.rand(others)
        return found

    assert drawn(others=1) == drawn(others=2)
    assert len(set(drawn(others=1))) == 4


def test_an_evaluation_leaves_module_buffers_as_they_were_and_each_batch_begins_with_them() -> None:
    """P1: who scores which batch depends on how many workers there are. Also of a module that is only registered."""
    net, average = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    job = alone()
    job.replicate(net)
    job.register(average=average)

    def means() -> list[list[float]]:
        return [module.state_dict()["running_mean"].tolist() for module in (net, average)]

    def score(batch: Batch) -> dict[str, float]:
        seen.append(means())
        return {"n": float((net(batch[0]) + average(batch[0])).sum())}

    for step in job.steps(dataset(8), global_batch=4, steps=1):
        for x, _ in step:
            net(x).sum().backward()
        seen = [means()]
        job.evaluate(dataset(8), score, batch_size=4)

    assert [*seen, means()] == [seen[0]] * 4
