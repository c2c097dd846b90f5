"""Numbers that are not finite: what is found, and what is done about it."""

from __future__ import annotations

import pytest
import torch

from craft.decide.detect.spikes import DivergenceAnswer, SpikeRule
from craft.decide.techniques.technique import Moment
from craft.protocol.events import NumbersDiverged
from craft.worker.monitor.nonfinite import NonFiniteGuard, NotFinite
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.flats import Flats
from craft.worker.state.metadata import TrainingProgress

MOMENT = Moment(step=0, branch=0, generation=1, members=("w0",))


class Model:
    def __init__(self, answer: DivergenceAnswer, *more: object) -> None:
        self.params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
        self.optimizer = torch.optim.SGD(self.params, lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.layout = BucketLayout(self.params, 1 << 20)
        self.flats = Flats(self.layout).tensors
        for flat in self.flats:
            flat.zero_()
        self.told: list[NumbersDiverged] = []
        self.numbers = NonFiniteGuard(answer, [self.optimizer, self.scheduler, *more], self.told.append)

    def check(self, step: int, loss: float = 1.0, gradient: float = 0.0) -> bool:
        self.flats[0][1] = gradient
        return self.numbers.check(step, [("loss", loss)], self.layout, self.flats)


def test_a_finite_step_is_left_alone() -> None:
    model = Model("skip")
    assert model.check(0, loss=1e30, gradient=3e38) and model.numbers.due is None


@pytest.mark.parametrize(
    ("loss", "gradient"), [(float("nan"), 0.0), (float("-inf"), 0.0), (1.0, float("inf")), (1.0, float("nan"))]
)
def test_a_loss_or_a_gradient_that_is_not_finite_is_found(loss: float, gradient: float) -> None:
    model = Model("skip")
    assert not model.check(7, loss, gradient)
    assert model.numbers.due is not None and model.numbers.due.step == 7
    assert model.check(8) and model.numbers.due is None


def test_gradients_whose_sum_overflows_are_finite_all_the_same() -> None:
    model = Model("skip")
    model.flats[0].fill_(3e38)
    assert model.numbers.check(0, [], model.layout, model.flats)


@pytest.mark.parametrize("bad", [complex(0, float("nan")), complex(float("inf"), 0)])
def test_both_parts_of_complex_gradients_are_looked_at(bad: complex) -> None:
    model = Model("skip")
    layout = BucketLayout([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))], 1 << 20)
    flats = Flats(layout).tensors
    flats[0].fill_(complex(1, -1))
    assert model.numbers.check(0, [], layout, flats)
    flats[0][1].fill_(bad)
    assert not model.numbers.check(1, [], layout, flats)


def test_with_a_gradient_scaler_only_the_loss_counts() -> None:
    model = Model("skip", torch.amp.GradScaler("cpu"))
    assert model.check(0, gradient=float("inf"))
    assert not model.check(1, loss=float("nan"))


def test_where_nothing_is_done_it_is_told_once() -> None:
    model = Model("report")
    told = [(model.check(step, loss=float("nan")), model.numbers.due is not None) for step in range(3)]
    assert told == [(True, True), (True, False), (True, False)]


def test_rates_are_lowered_for_a_while_behind_the_back_of_schedulers() -> None:
    model = Model("lower-lr")
    model.numbers.load(TrainingProgress(lowered_until=2))
    weights = []
    for step in range(3):
        model.check(step)
        for param in model.params:
            param.grad = torch.ones_like(param)
        model.optimizer.step()
        model.scheduler.step()
        weights.append(float(model.params[0].detach()[0]))
    # Rates of 1, 0.5 and 0.25, of which the first two count for a tenth.
    assert weights == pytest.approx([0.9, 0.85, 0.6])
    assert not model.check(10, loss=float("nan")) and model.numbers.lowered_until == 111


def test_a_job_that_is_to_end_then_ends() -> None:
    model = Model("stop")
    model.check(0)
    model.numbers.after_commit(MOMENT)
    model.check(1, loss=float("inf"))
    with pytest.raises(NotFinite, match="loss is inf in step 1"):
        model.numbers.after_commit(MOMENT)


def test_going_back_to_one_place_again_and_again_ends_the_job() -> None:
    numbers = Model("rollback").numbers
    for step in (10, 10, 20, 20, 20):
        numbers.went_back(step)
    with pytest.raises(NotFinite, match="step 20 3 times"):
        numbers.went_back(20)


def test_a_gradient_scaler_leaves_out_a_step_that_is_to_change_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu")
    model = Model("skip", scaler)
    scaler.scale(torch.stack([param.sum() for param in model.params]).sum()).backward()
    assert not model.check(0, loss=float("nan"))
    model.numbers.leave_out(model.params)
    scaler.step(model.optimizer)
    scaler.update()
    assert all(bool((param == 1).all()) for param in model.params)


SPIKES = SpikeRule(metric="loss", window=5, ratio=3.0)


def test_a_spike_is_answered_like_a_number_that_is_not_finite() -> None:
    model = Model("skip")
    model.numbers = NonFiniteGuard("skip", [], model.told.append, SPIKES)
    assert all(model.check(step, loss=1.0) for step in range(5))
    assert not model.check(5, loss=4.0)
    assert model.numbers.due is not None
    assert model.numbers.due.what == "loss is 4, 4 times the median of the last 5 steps, 1"
    assert model.check(6, loss=1.0) and model.numbers.due is None


def test_a_worker_that_takes_the_state_finds_the_same_spikes() -> None:
    veteran = Model("skip")
    veteran.numbers = NonFiniteGuard("skip", [], veteran.told.append, SPIKES)
    for step in range(5):
        veteran.check(step, loss=1.0)
    joiner = Model("skip")
    joiner.numbers = NonFiniteGuard("skip", [], joiner.told.append, SPIKES)
    assert joiner.check(5, loss=4.0), "it knows nothing yet"
    joiner.numbers.load(TrainingProgress(recent=veteran.numbers.recent))
    assert not joiner.check(5, loss=4.0)


def test_without_the_number_that_is_looked_at_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Model("skip")
    model.numbers = NonFiniteGuard("skip", [], model.told.append, SpikeRule(metric="perplexity", window=5, ratio=3.0))
    assert all(model.check(step) for step in range(3))
    (said,) = caplog.messages
    assert "'perplexity', which the script did not log in it (it logged: loss)" in said
