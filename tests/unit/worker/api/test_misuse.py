"""What a script may not do with a job, and with which sentence it is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard

from craft.protocol.errors import ConfigError
from craft.worker.api.job import Job

from ..alone import alone, dataset, loss_of, model


def empty(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[Any]:
    return iter(())


def test_streams_without_any_data_are_an_error() -> None:
    job = alone()
    job.replicate(model())
    (step,) = itertools.islice(job.steps(empty, microbatches=2), 1)

    with pytest.raises(ConfigError, match="the stream ended before it gave any data: there is nothing to train on"):
        list(step)


def break_inner(job: Job) -> None:
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        for _ in step:
            break


def skip_inner(job: Job) -> None:
    for _ in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        continue


def iterate_twice(job: Job) -> None:
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        for _ in itertools.chain(step, step):
            pass


def weigh_outside(job: Job) -> None:
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        step.weight(1)


def weigh(job: Job, value: float) -> None:
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        for _ in step:
            step.weight(value)


def train_another(job: Job) -> None:
    job.register(sgd=torch.optim.SGD([*job._loops.modules["model"].parameters(), *torch.nn.Linear(3, 2).parameters()]))
    job.steps(dataset(4), global_batch=4, steps=2)


def grow(job: Job) -> None:
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        for _ in step:
            pass
        job._loops.modules["model"].head = torch.nn.Linear(3, 2)


def log(job: Job, *, after: bool = False, **scalars: Any) -> None:
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2):
        for _ in step:
            if not after:
                step.log(**scalars)
        step.log(**scalars)


def call_again(job: Job, call: str) -> None:
    job.steps(dataset(4), global_batch=4, steps=2)
    if call == "steps":
        job.steps(dataset(4), global_batch=4, steps=2)
    elif call == "replicate":
        job.replicate(model())
    else:
        job.register(optimizer=torch.optim.SGD(model().parameters()))


NOT_ENDED = "step 0 was not iterated to its end: `for batch in step` must run until it stops by itself"
OUR_NAME = "is reserved: CRAFT writes it to metrics.jsonl; give the metric another name"
IN_LOOP = "in the loop over job.steps: it belongs before that loop, or after it"


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        (break_inner, NOT_ENDED),
        (skip_inner, NOT_ENDED),
        (iterate_twice, "step 0 was iterated twice: each step has one inner loop"),
        (weigh_outside, "step.weight(n) belongs into the inner loop: it weighs the microbatch that is being computed"),
        (lambda job: weigh(job, -1), "step.weight(-1.0): a weight is a finite number of at least 0"),
        (lambda job: weigh(job, float("nan")), "step.weight(nan): a weight is a finite number of at least 0"),
        (lambda job: weigh(job, float("inf")), "step.weight(inf): a weight is a finite number of at least 0"),
        (lambda job: log(job, step=5.5), f"step.log(step=...): step {OUR_NAME}"),
        (lambda job: log(job, loss=1.0, time=-1.0), f"step.log(time=...): time {OUR_NAME}"),
        (lambda job: log(job, branch=3, after=True), f"step.log(branch=...): branch {OUR_NAME}"),
        (lambda job: log(job, x="1.5"), "step.log(x='1.5'): a metric is one real number"),
        (lambda job: log(job, x=None), "step.log(x=None): a metric is one real number"),
        (
            lambda job: log(job, x=torch.ones(3)),
            "step.log(x=...): a metric is one real number, not a tensor of shape (3,) and torch.float32",
        ),
        (
            lambda job: log(job, x=torch.ones((), dtype=torch.complex64)),
            "step.log(x=...): a metric is one real number, not a tensor of shape () and torch.complex64",
        ),
        (lambda job: call_again(job, "steps"), f"job.steps() {IN_LOOP}"),
        (lambda job: call_again(job, "replicate"), f"job.replicate() {IN_LOOP}"),
        (lambda job: call_again(job, "register"), f"job.register() {IN_LOOP}"),
        (
            train_another,
            "the optimizer registered as sgd has a parameter of shape (2, 3) that is in no module given to job.replicate:"
            " every worker would train its own. Replicate the module that it is of",
        ),
        (
            grow,
            "the parameter model.head.weight was put there after the loop began: it would not be the same on every worker."
            " Build the whole model before job.replicate; in the loop change values in place, under torch.no_grad()",
        ),
        (
            lambda job: (job.checkpoints(Path("somewhere"), every=500), job.steps([0], global_batch=1, steps=1)),
            "every='500': say 'auto', or such as '500 steps', '1 epoch', '30 s', '10 min' or '1 h'",
        ),
        (lambda job: job.stop(), "job.stop() before job.steps(): there is no loop to end"),
        (
            lambda job: job.register(thing=7),
            "register(thing=...) got a int, which has no state_dict and load_state_dict",
        ),
        (
            lambda job: [job.register(one=torch.optim.SGD(model().parameters())) for _ in range(2)],
            "register(one=...): something else is registered under this name",
        ),
        (
            lambda job: job.on(int, print),
            "job.on(<class 'int'>, ...): the first argument is an event type of craft.events",
        ),
    ],
)
def test_misuse_is_refused_with_a_sentence(misuse: Callable[[Job], object], sentence: str) -> None:
    job = alone()
    job.replicate(model())

    with pytest.raises(ConfigError) as caught:
        misuse(job)

    assert str(caught.value) == sentence


def test_a_loop_without_a_model_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"job.steps\(\) before job.replicate\(model\): there is nothing to train yet"
    ):
        alone().steps(dataset(4), global_batch=4, steps=1)


def test_a_model_whose_forward_exchanges_statistics_is_refused_by_the_name_of_the_module() -> None:
    with pytest.raises(ConfigError) as caught:
        alone().replicate(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)))

    assert str(caught.value) == (
        "1 is a SyncBatchNorm, which exchanges statistics inside the forward pass and so would make a microbatch depend on"
        " who computes the others: use BatchNorm or GroupNorm instead"
    )


def test_a_sharded_parameter_is_refused_by_its_name() -> None:
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        fully_shard(sharded[1])
        with pytest.raises(ConfigError) as caught:
            alone().replicate(sharded)
    finally:
        dist.destroy_process_group()

    assert str(caught.value) == (
        "1.weight is a DTensor, as fully_shard and parallelize_module make them, on a mesh that CRAFT does not know: start the"
        " job with --workers-per-replica, and make the mesh with job.mesh(shard=...)"
    )


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_whose_forward_changes_its_weight_is_refused(kind: type[torch.nn.Module]) -> None:
    alone().replicate(kind(3, 2))

    with pytest.raises(
        ConfigError, match="0 is an embedding with max_norm, which changes its weight inside the forward"
    ):
        alone().replicate(torch.nn.Sequential(kind(3, 2, max_norm=1.0)))


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="pass the plain module, CRAFT replaces it"):
            alone().replicate(torch.nn.parallel.DistributedDataParallel(model()))
    finally:
        dist.destroy_process_group()


def test_a_model_without_shapes_yet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0.weight has no shape yet: run one batch through the model before"):
        alone().replicate(torch.nn.Sequential(torch.nn.LazyLinear(2)))


def test_a_loss_divided_by_the_number_of_workers_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    job = alone()
    net = job.replicate(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.register(optimizer=optimizer)
    for step in job.steps(dataset(24), global_batch=8, microbatches=4, steps=3):
        optimizer.zero_grad()
        for batch in step:
            (loss_of(net, batch) / job.world_size).backward()
            assert job.world_size == 1
        optimizer.step()
    said = [each for each in caplog.messages if "job.world_size is read while a microbatch is computed" in each]
    assert len(said) == 1


def test_the_number_of_workers_may_be_read_after_backward(caplog: pytest.LogCaptureFixture) -> None:
    job = alone()
    net = job.replicate(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.register(optimizer=optimizer)
    for step in job.steps(dataset(24), global_batch=8, microbatches=4, steps=3):
        optimizer.zero_grad()
        for batch in step:
            loss_of(net, batch).backward()
            assert job.world_size == 1
        optimizer.step()
    assert not [each for each in caplog.messages if "job.world_size" in each]
