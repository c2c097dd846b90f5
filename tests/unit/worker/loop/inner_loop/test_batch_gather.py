"""``step.gather``: every microbatch sees the rows of all, and the gradient is that of the loss over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from craft.protocol.errors import ConfigError
from craft.worker.api.job import Job
from craft.worker.api.steps import Step

from ...alone import alone


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def loss(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Of pairs, over a whole batch."""
        logits = self.scale * F.normalize(left) @ F.normalize(right).t()
        labels = torch.arange(len(left))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def pairs(length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), torch.randn(4, generator=generator)) for _ in range(length)]


def job_of(net: torch.nn.Module, **settings: Any) -> Job:
    job = alone(**settings)
    job.replicate(net)
    return job


@pytest.mark.parametrize(("global_batch", "microbatches"), [(8, 1), (8, 4), (7, 3)])
def test_the_gradient_is_that_of_the_loss_over_the_whole_batch(global_batch: int, microbatches: int) -> None:
    """Also with microbatches of different sizes, in a last, partial batch, and of parameters behind the gathering."""
    net, plain, data = Encoder(), Encoder(), pairs(18)
    for step in job_of(net).steps(data, global_batch=global_batch, microbatches=microbatches, epochs=1, shuffle=False):
        seen = []
        for left, right in step:
            loss = net.loss(step.gather(net.net(left)), step.gather(net.net(right)))
            loss.backward()
            seen.append(step.microbatch)
            step.log(loss=loss)
        whole = data[step.number * global_batch :][:global_batch]
        plain.zero_grad()
        expected = plain.loss(*(plain.net(torch.stack(each)) for each in zip(*whole, strict=True)))
        expected.backward()
        grads = [[param.grad for param in each.parameters()] for each in (net, plain)]
        torch.testing.assert_close(*grads)
        assert step.metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert seen == [*range(len(seen) // 2)] * 2


def test_the_microbatch_that_is_computed_for_comparison_gives_no_rows() -> None:
    """In step 3 it comes before any other, when it is not known yet that the step gathers."""
    found = []
    for check_bits in (True, False):
        net, losses = Encoder(), []
        job = job_of(net, check_bits=check_bits)
        for step in job.steps(pairs(24), global_batch=4, microbatches=2, epochs=1, shuffle=False):
            for left, right in step:
                loss = net.loss(step.gather(net.net(left)), step.gather(net.net(right)))
                loss.backward()
                step.log(loss=loss)
            losses.append(
                (
                    step.metrics["loss"],
                    [param.grad.sum().item() for param in net.parameters() if param.grad is not None],
                )
            )
        found.append(losses)
    assert found[0] == found[1] and len(found[0]) == 6


def test_both_passes_over_a_microbatch_have_the_same_data_random_numbers_and_buffers() -> None:
    """The script may change its batch in place; and rows that get no gradient are gathered, too."""
    norm = torch.nn.BatchNorm1d(4)
    net, drawn = torch.nn.Sequential(norm, torch.nn.Dropout(0.5), torch.nn.Linear(4, 3)), []
    for step in job_of(net).steps(pairs(12), global_batch=6, microbatches=3, steps=2):
        for left, right in step:
            left.mul_(2)
            labels = step.gather(torch.full((len(left),), float(step.microbatch or 0)))
            rows = step.gather(net(left))
            torch.autograd.backward((rows @ rows.t()).pow(2).mean() + right.sum() * 0)
            drawn.append((step.number, step.microbatch, torch.rand(()).item()))
        assert labels.tolist() == [0, 0, 1, 1, 2, 2]
        assert norm.num_batches_tracked is not None and norm.num_batches_tracked.item() == step.number + 1
    assert len(drawn) == 12 and len(set(drawn)) == 6


def test_a_microbatch_whose_stream_has_ended_has_no_rows() -> None:
    net, sizes = Encoder(), []
    ends = [3, 1, 2]

    def stream(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2, 4) * (microbatch + 1)] * (ends[microbatch] - start_step))

    for step in job_of(net).steps(stream, microbatches=3):
        for x in step:
            rows = step.gather(net.net(x))
            rows.pow(2).sum().backward()
        sizes.append(len(rows))
    assert sizes == [6, 4, 2]


def in_some(net: Encoder, step: Step, left: torch.Tensor, passes: int) -> torch.Tensor:
    return net.net(left) if step.microbatch == 0 else step.gather(net.net(left))


def in_others(net: Encoder, step: Step, left: torch.Tensor, passes: int) -> torch.Tensor:
    return step.gather(net.net(left)) if step.microbatch == 0 else net.net(left)


def first_only(net: Encoder, step: Step, left: torch.Tensor, passes: int) -> torch.Tensor:
    return net.net(left) if passes > 2 else step.gather(net.net(left))


def once_more(net: Encoder, step: Step, left: torch.Tensor, passes: int) -> torch.Tensor:
    rows = step.gather(net.net(left))
    return step.gather(rows) if passes > 2 else rows


def other_rows(net: Encoder, step: Step, left: torch.Tensor, passes: int) -> torch.Tensor:
    return step.gather(net.net(left) * passes)


def no_rows(net: Encoder, step: Step, left: torch.Tensor, passes: int) -> torch.Tensor:
    return step.gather(net.net(left).sum())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (in_some, "microbatch 1 called step.gather.*, and microbatch 0 did not"),
        (in_others, "microbatch 1 did not call step.gather"),
        (first_only, "microbatch 0 called step.gather.* less often than before"),
        (once_more, "microbatch 0 called step.gather.* more often than before"),
        (other_rows, "gave other rows to step.gather.* than in the first pass"),
        (no_rows, "the tensor has no rows"),
    ],
)
def test_what_cannot_be_right_is_refused(rows: Callable[..., torch.Tensor], words: str) -> None:
    net = Encoder()

    def train() -> None:
        passes = 0
        for step in job_of(net).steps(pairs(8), global_batch=4, microbatches=2, steps=2):
            for left, _ in step:
                passes += 1
                torch.autograd.backward(rows(net, step, left, passes).sum())

    with pytest.raises(ConfigError, match=words):
        train()


def test_outside_of_the_inner_loop_and_in_own_loops_there_is_nothing_to_gather() -> None:
    net = Encoder()
    for step in job_of(net).steps(pairs(4), global_batch=4, steps=1):
        list(step)
        with pytest.raises(ConfigError, match="belongs into the inner loop"):
            step.gather(torch.ones(1, 1))
    job = job_of(net)
    for attempt in job.attempts(microbatches=1, steps=1):
        with attempt, pytest.raises(ConfigError, match=r"step.gather in job.steps\(\) only"):
            attempt.gather(torch.ones(1, 1))
