"""A loop of the script's own, alone in this process: what an attempt gives, and what it refuses with which sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from craft.protocol.errors import ConfigError
from craft.snapshots.state.serialized import State, load
from craft.worker.api.adapter_access import finish
from craft.worker.api.attempts import StepAttempt
from craft.worker.recovery.undo import StateCopy

from ..alone import alone, dataset, grads, loss_of, model


def job_of(net: torch.nn.Module) -> Any:
    job = alone()
    job.replicate(net)
    return job


@pytest.mark.parametrize(("global_batch", "microbatches"), [(8, 1), (8, 3), (7, 5)])
def test_after_the_microbatches_the_gradient_is_the_mean_over_the_global_batch(
    global_batch: int, microbatches: int
) -> None:
    """Of those parameters alone that were asked for; also for the last, partial batch of a pass."""
    data, net, plain = dataset(18), model(), model()
    sizes = []
    for attempt in job_of(net).attempts(
        data, global_batch=global_batch, microbatches=microbatches, epochs=1, shuffle=False
    ):
        with attempt:
            for batch in attempt.microbatches(net[0].parameters()):
                loss_of(net, batch).backward()
            begin = attempt.step * global_batch
            whole = data[begin : begin + global_batch]
            plain.zero_grad()
            loss_of(plain, (torch.stack([x for x, _ in whole]), torch.stack([y for _, y in whole]))).backward()
            torch.testing.assert_close(grads(net[0]), grads(plain[0]))
            sizes.append(len(whole))
        assert attempt.committed
    assert sum(sizes) == 18


def test_each_part_of_a_body_has_gradients_metrics_and_random_numbers_of_its_own() -> None:
    net, seen = model(), []
    for attempt in job_of(net).attempts(microbatches=4, steps=2, seed=5):
        with attempt:
            for part in ("first", "second"):
                for microbatch in attempt.microbatches(net.parameters()):
                    drawn = torch.rand(1, 3)
                    seen.append(drawn.sum().item())
                    (net(drawn) * microbatch).sum().backward()
                    attempt.log(**{part: microbatch})
                assert attempt.metrics[part] == 1.5
        assert attempt.metrics == {"first": 1.5, "second": 1.5}
    assert len(set(seen)) == len(seen) == 16


def test_a_metric_of_an_attempt_has_a_name_of_its_own() -> None:
    net = model()
    for attempt in job_of(net).attempts(microbatches=2, steps=1):
        with attempt:
            for microbatch in attempt.microbatches(net.parameters()):
                (net(torch.ones(1, 3)) * microbatch).sum().backward()
                with pytest.raises(ConfigError, match=r"attempt.log\(step=...\): step is reserved"):
                    attempt.log(step=1)


def test_a_step_that_is_taken_back_leaves_nothing_behind() -> None:
    net, balance = model(), {"lead": 1.0}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    job = alone()
    job.replicate(net)
    job.register(optimizer=optimizer)
    job.register_state(save=lambda: dict(balance), load=balance.update)
    modules, registered = job._loops.modules, job._loops.registered
    kept = StateCopy(lambda: State(modules, registered, b""), modules, registered)
    before = [param.clone() for param in net.parameters()]
    for _ in range(2):
        kept.take()
        F.mse_loss(net(torch.ones(1, 3)), torch.ones(1, 1)).backward()
        optimizer.step()
        balance["lead"] = 2.0
        assert not torch.equal(before[0], next(net.parameters()))
        kept.put_back()
        assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
        assert not optimizer.state_dict()["state"] and balance == {"lead": 1.0}
    # Code after a step that was taken back has changed it: the next try begins from the same state.
    balance["lead"] = 3.0
    kept.put_back_again()
    assert balance == {"lead": 1.0}
    # Nothing has changed since: what the script has now is its own.
    with torch.no_grad():
        next(net.parameters()).zero_()
    kept.put_back()
    assert not next(net.parameters()).any()


def test_state_by_two_functions_follows_the_job_like_any_other() -> None:
    """With ``job.steps``, too: in checkpoints, to joiners, and in the hash of the final state."""
    mine: dict[str, Any] = {"seen": [1, 2], "mean": torch.arange(3.0)}
    theirs: dict[str, Any] = {"seen": [], "mean": torch.zeros(3)}
    jobs = []
    for values in (mine, theirs):
        job = alone()
        job.register_state(save=values.copy, load=values.update)
        job.register_state(save=lambda: 7, load=lambda _: None, name="other")
        jobs.append(job)
    state = State({}, jobs[0]._loops.registered, b"")
    load(state.header, state.tensors, {}, jobs[1]._loops.registered)
    assert list(state.header.skeleton) == ["state", "other"]
    assert theirs["seen"] == [1, 2] and torch.equal(theirs["mean"], mine["mean"])


def test_state_that_is_not_two_functions_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes two functions"):
        alone().register_state(save={}, load=print)  # type: ignore[arg-type]


def test_a_loop_without_any_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="no state that could be put back"):
        alone().attempts(steps=1)


def test_a_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no stream"):
        job_of(model()).attempts(lambda microbatch, of, step: iter(()), steps=1)


def test_an_attempt_that_is_not_entered_is_an_error() -> None:
    with pytest.raises(ConfigError, match="was not entered"):
        for _ in job_of(model()).attempts(steps=2):
            pass


def left_early(attempt: StepAttempt, net: torch.nn.Module) -> None:
    for _ in attempt.microbatches(net.parameters()):
        break


def within(attempt: StepAttempt, net: torch.nn.Module) -> None:
    for _ in attempt.microbatches(net.parameters()):
        next(iter(attempt.microbatches(net.parameters())))


def wrong(attempt: StepAttempt, net: torch.nn.Module) -> None:
    raise ZeroDivisionError("in the body")


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (left_early, ConfigError, "left before its end"),
        (within, ConfigError, "within another one"),
        (wrong, ZeroDivisionError, "in the body"),
    ],
)
def test_an_error_of_the_body_comes_through(
    body: Callable[[StepAttempt, torch.nn.Module], None], error: type[Exception], words: str
) -> None:
    net = model()

    def run() -> None:
        for attempt in job_of(net).attempts(microbatches=2, steps=2):
            with attempt:
                body(attempt, net)

    with pytest.raises(error, match=words):
        run()


def test_microbatches_outside_of_the_body_are_an_error() -> None:
    net = model()
    for attempt in job_of(net).attempts(steps=1):
        with pytest.raises(ConfigError, match="belongs into `with attempt:`"):
            next(iter(attempt.microbatches(net.parameters())))
        with attempt:
            pass


def test_calls_to_all_workers_belong_between_the_loops_over_microbatches() -> None:
    net = model()
    job = job_of(net)
    for attempt in job.attempts(microbatches=2, steps=1):
        with attempt:
            assert job.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
            assert job.broadcast_object({"a": 1}) == {"a": 1}
            for _ in attempt.microbatches(net.parameters()):
                with pytest.raises(ConfigError, match="outside of that loop"):
                    job.barrier()
            with pytest.raises(ConfigError, match="the rest after it"):
                job.evaluate(dataset(4), lambda batch: {"n": 1.0}, batch_size=2)
        assert job.evaluate(dataset(4), lambda batch: {"n": 1.0}, batch_size=2) == {"n": 1.0}


def test_a_loop_that_is_left_by_a_break_ends_with_the_script() -> None:
    job = job_of(model())
    for attempt in job.attempts(microbatches=1):
        with attempt:
            pass
        if attempt.step == 2:
            break
    finish(job)
    assert job.step == 3


def test_what_is_drawn_before_a_body_depends_on_the_step_alone() -> None:
    """P1: one that joins, and one that tries again, has drawn other numbers until then."""

    def drawn(others: int) -> list[float]:
        found = []
        torch.rand(others)
        for attempt in job_of(model()).attempts(microbatches=2, steps=3):
            found.append(torch.rand(()).item())
            with attempt:
                for _ in attempt.microbatches():
                    pass
            torch.rand(others)
        return found

    assert drawn(others=1) == drawn(others=2)
