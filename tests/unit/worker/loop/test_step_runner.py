"""The step in flight, between workers that are threads here: what is computed, what is redone, what is committed."""

from __future__ import annotations

import torch

from craft.worker.monitor.repeated_microbatch import place_of, repeat_of

from ..alone import alone, dataset, model, train
from ..crew import MICROBATCHES, STEPS, Crew, Killed, Worker, trained_alone, wait_for
from ..crew import train as script

LOST_IN = 5


def lose_one(crew: Crew, killed_at: int) -> Worker:
    """Two workers; w1 is killed before it computes ``killed_at`` of its step, and w0 goes on alone."""

    def dies(worker: Worker) -> None:
        def before(step: int, microbatch: int) -> None:
            if (step, microbatch) == (LOST_IN, killed_at):
                raise Killed

        script(worker, before)

    survivor, victim = crew.add("w0", script, check_bits=False), crew.add("w1", dies, check_bits=False)
    crew.direct(crew.generation("w0", "w1"))
    survivor.start()
    victim.start()
    wait_for(lambda: isinstance(victim.error, Killed), "w1 dies")
    crew.direct(crew.generation("w0"))
    crew.join()
    assert survivor.error is None
    return survivor


def test_only_the_microbatches_of_a_lost_worker_are_computed_again_with_the_same_bits_P1_P2() -> None:
    crew = Crew()
    survivor = lose_one(crew, 3)
    assert survivor.job.step == STEPS and survivor.job.generation == 2
    mine = [microbatch for step, microbatch in survivor.computed if step == LOST_IN]
    assert sorted(mine) == list(range(MICROBATCHES)), "it holds its own share, and computes each other one once"
    assert all(torch.equal(a, b) for a, b in zip(survivor.params, trained_alone(), strict=True))


def test_workers_share_the_microbatches_and_hold_the_same_bits_P3() -> None:
    crew = Crew()
    workers = [crew.add(name, script, check_bits=False) for name in ("w0", "w1")]
    crew.direct(crew.generation("w0", "w1"))
    for worker in workers:
        worker.start()
    crew.join()
    assert [worker.error for worker in workers] == [None, None]
    whole = sorted(each for worker in workers for each in worker.computed)
    assert whole == [(step, microbatch) for step in range(STEPS) for microbatch in range(MICROBATCHES)]
    for worker in workers:
        assert all(torch.equal(a, b) for a, b in zip(worker.params, trained_alone(), strict=True))


def given_out(*, check_bits: bool) -> list[list[int]]:
    """The numbers that the runner of a worker alone gives out, step by step; here is what an inner loop does with them."""
    job, data = alone(check_bits=check_bits), dataset(12)
    found: list[list[int]] = []
    net = job.replicate(model())
    training = job.steps(data, global_batch=3, microbatches=3, steps=4)._training
    with training.running():
        while training.wants_more():
            training.begin()
            found.append([])
            while (microbatch := training.runner.next_microbatch()) is not None:
                found[-1].append(microbatch)
                training.runner.start(microbatch, 1.0)
                train(net, data[place_of(microbatch)])
                training.runner.hold(microbatch, {}, more=True)
            training.committed(training.applied)
    return found


def test_it_gives_out_the_plan_in_order_and_one_repeat_before_it() -> None:
    assert given_out(check_bits=False) == [[0, 1, 2]] * 4
    assert given_out(check_bits=True) == [*[[0, 1, 2]] * 3, [repeat_of(0), 0, 1, 2]]


def test_a_gradient_that_comes_late_is_exchanged_again_and_counts() -> None:
    """The last microbatch calls backward() once more than the ones before: its buckets were flushed already."""
    # A bucket for each parameter: all but the last are exchanged during backward.
    job = alone(check_bits=False, bucket_mb=1e-5)
    net, plain = job.replicate(model()), model()
    for step in job.steps(dataset(4), global_batch=4, microbatches=2, steps=2, shuffle=False):
        for batch in step:
            train(net, batch)
            if (step.number, step.microbatch) == (1, 1):
                train(net, batch)
        if step.number == 1:
            data = dataset(4)
            for rows, times in (((0, 1), 1), ((2, 3), 2)):
                x, y = (torch.stack([data[row][column] for row in rows]) for column in (0, 1))
                for _ in range(times):
                    train(plain, (x, y))
            for one, other in zip(net.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                torch.testing.assert_close(one.grad, other.grad / 2)
