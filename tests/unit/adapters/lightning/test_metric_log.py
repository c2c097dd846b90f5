"""What is logged in a microbatch travels with it; every worker logs the means."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchmetrics

from craft.adapters.lightning.metric_log import MetricRecorder, load, named, save
from craft.worker.loop.inner_loop.microbatch import ScriptNotes

HOW: dict[str, Any] = {"prog_bar": True, "logger": True, "on_step": True, "on_epoch": True}


class Word:
    """What a step does with what is logged in it."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.notes = ScriptNotes()

    def log(self, **scalars: torch.Tensor) -> None:
        self.values |= {name: float(value) for name, value in scalars.items()}


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def results(request: pytest.FixtureRequest) -> Any:
    """Lightning's own, of either package."""
    import importlib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        home = importlib.import_module(f"{request.param}.trainer.connectors.logger_connector.result")
    return lambda: home._ResultCollection(training=True)


def recorded(*values: float) -> tuple[MetricRecorder, Word]:
    recorder, word = MetricRecorder(), Word()
    for value in values:
        recorder.log("training_step", "loss_a", torch.tensor(value), reduce_fx=torch.mean, **HOW)
        recorder.log("on_after_backward", "norm", torch.tensor(value), reduce_fx="max", on_step=True, on_epoch=False)
    recorder.tell(word)  # type: ignore[arg-type]
    return recorder, word


def test_values_travel_by_their_name_and_outside_of_training_step_with_that_of_the_hook() -> None:
    _, word = recorded(2.0)
    assert word.values == {"loss_a": 2.0, "on_after_backward.norm": 2.0}


@pytest.mark.filterwarnings("ignore")
def test_names_of_crafts_own_travel_with_that_of_the_hook_and_are_logged_as_they_are(results: Any) -> None:
    """Lightning's loggers take a value called ``step`` for the place on their axis: scripts do log it."""
    recorder, word, found = MetricRecorder(), Word(), results()
    for name in ("step", "time", "branch"):
        recorder.log("training_step", name, torch.tensor(3.0), reduce_fx=torch.mean, **HOW)
    recorder.tell(word)  # type: ignore[arg-type]
    assert word.values == {"training_step.step": 3.0, "training_step.time": 3.0, "training_step.branch": 3.0}
    recorder.put(found, word.values, samples=4, said=word.notes.said)
    assert set(found.metrics(on_step=False)["callback"]) >= {"step", "time", "branch"}
    assert named({"step": torch.tensor(2.0), "loss": torch.tensor(1.0)}) == {"callback_metrics.step": 2.0, "loss": 1.0}


@pytest.mark.filterwarnings("ignore")
def test_means_over_the_global_batch_become_values_of_the_step_and_of_the_epoch(results: Any) -> None:
    recorder, word = recorded(2.0)
    found = results()
    recorder.put(found, {"loss_a": 1.0, "loss": 7.0}, samples=32, said=word.notes.said)
    recorder.put(found, {"loss_a": 4.0}, samples=16)
    assert {name: float(value) for name, value in found.metrics(on_step=True)["log"].items()} == {"loss_a_step": 4.0}
    assert float(found.metrics(on_step=False)["callback"]["loss_a"]) == 2.0, "weighed by samples"
    assert "loss" not in found.metrics(on_step=False)["callback"], "nobody logged that"


@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_joins_has_the_values_of_the_epoch_so_far(results: Any) -> None:
    recorder, word = recorded(2.0)
    theirs, own, joiner = results(), results(), MetricRecorder()
    recorder.put(theirs, {"loss_a": 1.0}, samples=32, said=word.notes.said)
    load(own, joiner, save(theirs, recorder))
    assert save(own, joiner) == save(theirs, recorder)
    for each, how in ((theirs, recorder), (own, joiner)):
        how.put(each, {"loss_a": 4.0}, samples=32)
    assert float(own.metrics(on_step=False)["callback"]["loss_a"]) == 2.5
    assert save(own, joiner) == save(theirs, recorder)


@pytest.mark.filterwarnings("ignore")
def test_what_only_another_worker_s_microbatch_logged_is_logged_here_too(results: Any) -> None:
    """As ``if some.any(): self.log(...)`` has it: what is decided by that must not depend on who saw it (P1)."""
    recorder, word = recorded(2.0)
    other, theirs, own = MetricRecorder(), results(), results()
    for who, found in ((recorder, theirs), (other, own)):
        who.put(found, word.values, samples=32, said=word.notes.said)
    assert own.metrics(on_step=False)["callback"] == theirs.metrics(on_step=False)["callback"]
    assert save(own, other) == save(theirs, recorder) != []


def test_how_a_value_is_logged_is_said_until_everybody_knows(results: Any) -> None:
    recorder, first = recorded(2.0)
    assert len(first.notes.said) == 2
    recorder.put(results(), first.values, samples=32, said=first.notes.said)
    again = Word()
    recorder.log("training_step", "loss_a", torch.tensor(1.0), reduce_fx=torch.mean, **HOW)
    recorder.tell(again)  # type: ignore[arg-type]
    assert again.notes.said == []


@pytest.mark.parametrize("how", ["called", "updated"])
def test_a_metric_counts_with_each_microbatch_whether_it_is_called_or_only_updated(how: str) -> None:
    """``update()`` and then ``self.log("acc", self.acc)`` is how torchmetrics has it: nothing was logged of that."""
    metric, recorder, found = torchmetrics.MeanMetric(), MetricRecorder(), []
    for value in (1.0, 3.0):
        (metric if how == "called" else metric.update)(torch.tensor(value))
        word = Word()
        recorder.log("training_step", "mean", metric, reduce_fx=torch.mean, **HOW)
        recorder.log("training_step", "again", metric, reduce_fx=torch.mean, **HOW)
        recorder.tell(word)  # type: ignore[arg-type]
        found.append(word.values)
    assert found == [{"mean": value, "again": value} for value in (1.0, 3.0)]
