"""A job of one worker in this process, with a small model and data: for what needs no others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Directive
from craft.settings.worker import WorkerSettings
from craft.worker.api.job import Job
from craft.worker.membership.client import MembershipClient
from craft.worker.report.activity_page import ActivityPage

Batch = tuple[torch.Tensor, torch.Tensor]


def alone(**settings: Any) -> Job:
    """A job of one worker."""
    membership = MembershipClient("w0", "127.0.0.1", b"", lambda *_: None)
    generation = Generation(number=1, nonce="alone", members=(Member(worker_id="w0"),))
    membership.direct(Directive(sequence=1, generation=generation))
    return Job(WorkerSettings(**settings), membership, None, ActivityPage(None), None)


def has_trained() -> Job:
    """One whose loop is over."""
    job = alone()
    job.replicate(model())
    for step in job.steps(dataset(4), global_batch=4, steps=1):
        list(step)
    return job


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def dataset(length: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, generator=generator), torch.randn(1, generator=generator)) for _ in range(length)]


def loss_of(net: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(net(batch[0]), batch[1])


def grads(net: torch.nn.Module) -> list[torch.Tensor]:
    found = [param.grad for param in net.parameters()]
    return [grad.clone() for grad in found if grad is not None]


def train(net: torch.nn.Module, batch: Any) -> None:
    torch.autograd.backward(loss_of(net, batch))
