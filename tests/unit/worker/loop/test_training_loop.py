"""One call of job.steps from its start to its end: what is done at each boundary, and how a script may leave it."""

from __future__ import annotations

import pytest
import torch

from craft.protocol.errors import ConfigError
from craft.protocol.membership import Settlement
from craft.worker.api.job import Job
from craft.worker.loop.training_loop import TrainingLoop

from ..alone import alone, dataset, model, train
from ..crew import STEPS, Crew, Worker, trained_alone, wait_for
from ..crew import train as script


def begun(steps: int = 3) -> tuple[Job, torch.nn.Module, TrainingLoop]:
    job = alone()
    net = job.replicate(model())
    return job, net, job.steps(dataset(12), global_batch=4, microbatches=2, steps=steps)._training


def one_step(training: TrainingLoop, net: torch.nn.Module) -> None:
    training.begin()
    while (microbatch := training.next_microbatch()) is not None:
        training.runner.start(microbatch, 1.0)
        train(net, dataset(1)[0])
        training.runner.hold(microbatch, {"loss": 2.0}, more=True)


def test_it_ends_after_its_steps_and_only_then_is_over() -> None:
    job, net, training = begun()
    seen = []
    with training.running():
        while training.wants_more():
            one_step(training, net)
            seen.append((training.applied, training.committed(training.applied)))
            assert not training.over
    assert seen == [(step, {"loss": 2.0}) for step in range(3)]
    assert training.over and training.loop_end.digest == training.state.digest()
    assert job.step == 3 and training.loop_end.company == ("w0",)


def test_a_script_that_asks_to_stop_gets_no_further_step() -> None:
    job, net, training = begun()
    with training.running():
        assert training.wants_more()
        job.stop("enough")
        one_step(training, net)
        training.committed(0)
        assert not training.wants_more()
    assert training.over and training.lifecycle.stop_reason is None, "a job that goes on from here has more steps"


def test_a_loop_left_after_a_commit_is_ended_later_and_one_left_within_a_step_never() -> None:
    job = alone()
    net = job.replicate(model())
    for step in job.steps(dataset(12), global_batch=4, microbatches=2, steps=3):
        for batch in step:
            train(net, batch)
        break
    training = job._training
    assert training is not None and training.broken_off and not training.over
    job.barrier()
    assert training.over and not training.broken_off, "the call is made after the loop, which has to end first"

    job = alone()
    job.replicate(model())
    for step in job.steps(dataset(12), global_batch=4, microbatches=2, steps=3):
        next(iter(step))
        break
    assert job._training is not None and not job._training.broken_off and not job._training.over


def test_a_stream_without_data_is_refused_in_the_step_that_has_none() -> None:
    job = alone()
    job.replicate(model())
    step = next(iter(job.steps(lambda *_: iter(()), microbatches=2, steps=3)))
    with pytest.raises(ConfigError, match="ended before it gave any data"):
        list(step)


def test_code_after_the_loop_that_changes_the_state_spoils_it_for_joiners() -> None:
    _, net, training = begun(1)
    with training.running():
        while training.wants_more():
            one_step(training, net)
            training.committed(training.applied)
    joins = Settlement(step=1, commits=(), owners=(), given=(), idle=("w1",), joiners=("w1",), over=True)
    training.settled(joins, level=True)
    assert not training.lifecycle.spoiled
    with torch.no_grad():
        next(net.parameters()).add_(1)
    training.settled(joins, level=True)
    assert training.lifecycle.attached.progress.spoiled


def test_a_worker_that_joins_gets_the_state_and_ends_with_the_same_bits_P1_P3() -> None:
    """It enters at a step boundary for which both are ready; nothing of the step before is computed again."""
    crew = Crew()

    def wait(step: int, _: int) -> None:
        if step == 3:
            # All of this step's word says: both are ready to enter.
            wait_for(lambda: all(each.membership.ready == 2 for each in (member, joiner)), "the group is open")

    member = crew.add("w0", lambda worker: script(worker, wait))
    joiner = crew.add("w1", script, late=True)
    first, second = crew.generation("w0"), crew.generation("w0", "w1")
    crew.direct(first)
    member.start()
    wait_for(lambda: member.job.step >= 2, "w0 trains")
    crew.direct(first, upcoming=second)
    joiner.start()
    crew.join()
    assert [member.error, joiner.error] == [None, None]
    for worker in (member, joiner):
        assert worker.job.generation == 2 and worker.job.step == STEPS
        assert all(torch.equal(a, b) for a, b in zip(worker.params, trained_alone(), strict=True))
    counted = [each for each in member.computed if each[0] < 4]
    assert sorted(set(counted)) == [(step, microbatch) for step in range(4) for microbatch in range(4)]


def test_a_worker_that_comes_after_the_loop_skips_it() -> None:
    """The others keep what they said at its end; the script of the late one goes on behind the loop."""
    crew = Crew()
    steps: list[int] = []

    def late(worker: Worker) -> None:
        for step in worker.job.steps(dataset(24), global_batch=8, microbatches=4, steps=4):
            steps.append(step.number)

    member = crew.add("w0", lambda worker: script(worker, steps=4))
    crew.direct(crew.generation("w0"))
    member.start()
    member.join()
    assert member.error is None and member.job._training is not None and member.job._training.over
    joiner = crew.add("w1", late, late=True)
    crew.direct(crew.generation("w0"))
    joiner.membership.loop = 2
    joiner.start()
    joiner.join(90)
    assert joiner.error is None and not steps and joiner.job.step == 4
