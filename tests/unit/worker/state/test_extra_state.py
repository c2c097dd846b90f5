"""What a module gives by ``get_extra_state`` travels with the training state."""

from __future__ import annotations

from typing import Any

import torch

from craft.snapshots.state.leaves import registered_leaves
from craft.snapshots.state.serialized import State, load
from craft.worker.api.job import Job

from ..alone import alone, model


class Counting(torch.nn.Linear):
    """Counts in a plain attribute, and says so in its ``state_dict``."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: dict[str, Any] = {"count": 0, "mean": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


def job_of(*nets: torch.nn.Module) -> Job:
    job = alone()
    for net in nets:
        job.replicate(net)
    return job


def test_a_joiner_has_the_extra_state_of_every_part_of_every_module() -> None:
    mine, theirs = ((Counting(), Counting(), Counting()) for _ in range(2))
    mine[1].seen = {"count": 7, "mean": torch.ones(2)}
    mine[2].seen = {"count": 9, "mean": torch.arange(2.0)}
    giver, joiner = (job_of(torch.nn.Sequential(*parts[:2]), parts[2]) for parts in (mine, theirs))

    state = State(giver._modules, giver._registered, b"")
    load(state.header, state.tensors, joiner._modules, joiner._registered)

    assert [part.seen["count"] for part in theirs] == [0, 7, 9]
    assert torch.equal(theirs[2].seen["mean"], torch.arange(2.0))


def test_it_may_be_another_one_on_every_worker() -> None:
    """As where forward counts something: that is no reason to end a job."""
    assert registered_leaves(job_of(Counting())._registered) == []


def test_a_module_without_any_registers_nothing() -> None:
    assert job_of(model())._registered == {}
