"""Loops that would give a wrong result unseen are refused in their first steps, or warned of; others are left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler

from craft.protocol.errors import UnsafeScript
from craft.worker.api.job import Job
from craft.worker.checks.script import ScriptChecks, ignored_sampler

from ..alone import alone, dataset, loss_of, model


class Loop:
    """A job of one with a model and its optimizer; ``run`` trains for some steps."""

    def __init__(self, register: bool = True, **settings: Any) -> None:
        self.job: Job = alone(**settings)
        self.net = model()
        self.optimizer = Adam(self.net.parameters(), lr=1e-2)
        self.job.replicate(self.net)
        if register:
            self.job.register(optimizer=self.optimizer)
        self.in_microbatch: Callable[[], object] = lambda: None
        self.after_step: Callable[[], object] = lambda: None
        self.loss: Callable[[Any], torch.Tensor] = lambda batch: loss_of(self.net, batch)

    def run(self, steps: int = 3, global_batch: int = 8) -> None:
        for step in self.job.steps(dataset(32), global_batch=global_batch, microbatches=4, steps=steps):
            self.optimizer.zero_grad()
            for batch in step:
                loss = self.loss(batch)
                loss.backward()
                self.in_microbatch()
                step.log(loss=loss)
            self.optimizer.step()
            self.after_step()


def refused(loop: Loop, sentence: str) -> None:
    with pytest.raises(UnsafeScript, match=re.escape(sentence)):
        loop.run()


def test_an_optimizer_that_is_not_registered_is_named_with_the_line_to_add() -> None:
    refused(Loop(register=False), "job.register(optimizer=optimizer)")


def test_an_optimizer_within_something_that_is_registered_is_in_order() -> None:
    class Both:
        def __init__(self, *optimizers: Optimizer) -> None:
            self.parts = {"all": list(optimizers)}

        def state_dict(self) -> dict[str, Any]:
            return {str(index): each.state_dict() for index, each in enumerate(self.parts["all"])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    loop = Loop(register=False)
    loop.job.register(both=Both(loop.optimizer))
    loop.run()


def test_an_optimizer_that_functions_save_is_in_order() -> None:
    loop = Loop(register=False)
    optimizer = loop.optimizer
    loop.job.register_state(save=lambda: optimizer.state_dict(), load=lambda state: optimizer.load_state_dict(state))
    loop.run()


def test_a_registered_scheduler_does_not_stand_for_its_optimizer() -> None:
    loop = Loop(register=False)
    scheduler = LambdaLR(loop.optimizer, lambda _: 1.0)
    loop.job.register(scheduler=scheduler)
    refused(loop, "is not registered: its state would not follow the job")


def test_an_optimizer_of_a_module_that_is_not_replicated_is_refused_with_that_module() -> None:
    loop = Loop()
    head = torch.nn.Linear(1, 1)
    other = SGD(head.parameters(), lr=0.1)
    loop.after_step = other.step
    refused(loop, "trains Linear.weight of shape (1, 1), Linear.bias of shape (1,), which is in no module given to")


def test_an_optimizer_that_is_made_and_used_within_one_step_is_left_alone() -> None:
    loop = Loop()

    def probe() -> None:
        guess = torch.zeros(3, requires_grad=True)
        inner = SGD([guess], lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            guess.square().sum().backward()
            inner.step()

    loop.in_microbatch = loop.after_step = probe
    loop.run()


def test_an_optimizer_made_in_the_loop_that_lives_on_is_refused() -> None:
    loop = Loop()
    kept: list[Optimizer] = []

    def train() -> None:
        if not kept:
            kept.append(SGD(loop.net.parameters(), lr=0.1))
        kept[0].step()

    loop.after_step = train
    refused(loop, "the optimizer SGD")


def test_a_module_that_is_trained_by_hand_without_being_replicated_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop()
    scale = torch.nn.Linear(1, 1)
    loop.loss = lambda batch: loss_of(torch.nn.Sequential(loop.net, scale), batch)

    def by_hand() -> None:
        with torch.no_grad():
            for param in scale.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)

    loop.after_step = by_hand
    (text,) = warnings_of(loop, caplog)
    assert "a Linear (weight (1, 1), bias (1,)) gets gradients and changes in the loop" in text


def test_a_scheduler_that_is_not_registered_is_refused_when_it_steps() -> None:
    loop = Loop()
    scheduler = LambdaLR(loop.optimizer, lambda step: 0.9**step)
    loop.after_step = scheduler.step
    refused(loop, "the scheduler LambdaLR steps in the loop and is not registered")


def test_parts_of_a_registered_scheduler_are_in_order() -> None:
    loop = Loop()
    parts: list[LRScheduler] = [LinearLR(loop.optimizer), LinearLR(loop.optimizer)]
    scheduler = SequentialLR(loop.optimizer, parts, milestones=[1])
    loop.job.register(scheduler=scheduler)
    loop.after_step = scheduler.step
    loop.run()


def _scaled(loop: Loop) -> torch.amp.GradScaler:
    """Have ``loop`` scale its losses, and leave the update to the scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = loop.loss
    loop.loss = lambda batch: scaler.scale(loss(batch))
    loop.after_step = scaler.update
    loop.optimizer.register_step_pre_hook(lambda *_: scaler.unscale_(loop.optimizer))
    return scaler


def test_a_scaler_that_is_not_registered_is_refused_when_it_is_updated() -> None:
    loop = Loop()
    scaler = _scaled(loop)
    with pytest.raises(UnsafeScript, match=r"a GradScaler is updated in the loop .* job\.register\(scaler=scaler\)"):
        loop.run()
    del scaler


def test_a_scaler_that_is_registered_or_not_used_is_in_order() -> None:
    loop = Loop()
    loop.job.register(scaler=_scaled(loop))
    unused = torch.amp.GradScaler("cpu")
    loop.run()
    del unused


def _averaged(loop: Loop) -> torch.optim.swa_utils.AveragedModel:
    """A moving average that the loop updates after each step."""
    average = torch.optim.swa_utils.AveragedModel(loop.net)
    loop.after_step = lambda: average.update_parameters(loop.net)
    return average


def test_an_average_that_is_not_registered_is_refused_when_it_is_updated() -> None:
    loop = Loop()
    average = _averaged(loop)
    with pytest.raises(
        UnsafeScript, match=r"an AveragedModel is updated in the loop .* job\.register\(average=average\)"
    ):
        loop.run()
    del average


def test_an_average_that_is_registered_or_stays_as_it_is_is_in_order() -> None:
    loop = Loop()
    loop.job.register(average=_averaged(loop))
    unused = torch.optim.swa_utils.AveragedModel(loop.net)
    loop.run()
    del unused


def test_a_sum_over_another_number_of_workers_than_before_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[Any] = []
    checks = ScriptChecks({}, {}, False, lambda: False, notes.append)
    for step, workers in enumerate((3, 3, 2, 2, 3)):
        checks.summed(workers, step)
    (note,) = notes
    assert "2 as step 2 begins, 3 before" in note.text
    assert "2 as step 2 begins, 3 before" in caplog.text


def test_a_scheduler_that_never_steps_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    scheduler = LambdaLR(loop.optimizer, lambda _: 1.0)
    loop.run()
    assert scheduler is not None
    assert sum("the scheduler LambdaLR" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize("kind", ["step", "clip", "zero"])
def test_gradients_are_not_used_or_changed_inside_the_loop_over_microbatches(kind: str) -> None:
    loop = Loop()
    mistakes: dict[str, Callable[[], object]] = {
        "step": loop.optimizer.step,
        "clip": lambda: torch.nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-6),
        "zero": loop.optimizer.zero_grad,
    }
    loop.in_microbatch = mistakes[kind]
    refused(loop, "inside the loop over")


def warnings_of(loop: Loop, caplog: pytest.LogCaptureFixture, **more: int) -> list[str]:
    loop.run(**more)
    return [each.getMessage() for each in caplog.records if each.name == "craft.worker.checks.script"]


@pytest.mark.parametrize("scaled", [lambda loss: loss / 4, lambda loss: loss * 0.25, lambda loss: 65536.0 * (loss / 4)])
def test_a_mean_that_is_divided_by_the_number_of_microbatches_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, scaled: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    loop = Loop()
    loop.loss = lambda batch: scaled(loss_of(loop.net, batch))
    (text,) = warnings_of(loop, caplog)
    assert "the loss is a mean that is divided by 4 before backward()" in text


@pytest.mark.parametrize(
    "loss",
    [
        lambda loss, _: loss,
        lambda loss, _: loss / 3,
        lambda loss, _: (loss + loss) / 4,
        lambda loss, _: torch.stack([loss, loss]).sum(),
        lambda _, each: each.sum() / len(each),
        lambda _, each: each.mean(),
    ],
)
def test_other_losses_are_not_warned_of(
    caplog: pytest.LogCaptureFixture, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    loop = Loop()
    loop.loss = lambda batch: loss(loss_of(loop.net, batch), (loop.net(batch[0]) - batch[1]).square())
    assert warnings_of(loop, caplog, global_batch=10) == []


def test_a_sum_over_uneven_microbatches_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    loop.loss = lambda batch: torch.nn.functional.mse_loss(loop.net(batch[0]), batch[1], reduction="sum")
    (text,) = warnings_of(loop, caplog, global_batch=10)
    assert "microbatches have from 2 to 3 samples" in text


def test_a_sum_over_even_microbatches_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    loop.loss = lambda batch: (loop.net(batch[0]) - batch[1]).square().sum()
    assert warnings_of(loop, caplog) == []


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_steps_for_each_microbatch_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    scheduler = LambdaLR(loop.optimizer, lambda _: 0.5)
    loop.job.register(scheduler=scheduler)
    loop.in_microbatch = scheduler.step
    (text,) = warnings_of(loop, caplog)
    assert text.startswith("scheduler: registered, and changed inside the loop over microbatches")


def test_a_registered_counter_of_microbatches_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    counts = {"seen": 0}
    loop.job.register_state(save=lambda: dict(counts), load=counts.update, name="counts")
    loop.in_microbatch = lambda: counts.update(seen=counts["seen"] + 1)
    (text,) = warnings_of(loop, caplog)
    assert text.startswith("counts: registered, and changed inside the loop over microbatches")


def test_what_is_registered_and_changes_after_the_inner_loop_is_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """So is the state of a random generator that a script saves: CRAFT seeds it in every microbatch."""
    loop = Loop()
    scheduler = LambdaLR(loop.optimizer, lambda _: 0.5)
    scaler = torch.amp.GradScaler("cpu")
    loop.job.register(scheduler=scheduler, scaler=scaler)
    loop.job.register_state(save=torch.get_rng_state, load=torch.set_rng_state, name="random")
    loop.in_microbatch = lambda: (scaler.scale(torch.ones(())), torch.rand(1))
    loop.after_step = scheduler.step
    assert warnings_of(loop, caplog) == []


def test_a_sampler_for_one_replica_is_no_news() -> None:
    samples = dataset(8)
    for replicas, said in ((1, False), (2, True)):
        sampler: Any = DistributedSampler(samples, num_replicas=replicas, rank=0)  # type: ignore[arg-type]
        assert bool(ignored_sampler(DataLoader(samples, sampler=sampler))) is said  # type: ignore[arg-type]
    assert ignored_sampler(samples) == ""


def test_the_checks_can_be_switched_off() -> None:
    Loop(register=False, check_script=False).run()


def test_nothing_stays_hooked_after_the_loop() -> None:
    before = Optimizer._patch_step_function, torch.Tensor.backward
    Loop().run()
    assert (Optimizer._patch_step_function, torch.Tensor.backward) == before
    # And so an optimizer of its own may step.
    net = model()
    loss_of(net, dataset(1)[0]).backward()
    SGD(net.parameters(), lr=0.1).step()
