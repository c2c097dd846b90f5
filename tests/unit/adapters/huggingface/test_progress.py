"""Where a Trainer is, handed from worker to worker."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import TrainerState

from craft.adapters.huggingface.progress import TrainerCallbackStates, TrainerProgress


def trainer(step: int = 0, *callbacks: Any) -> Any:
    return SimpleNamespace(
        state=TrainerState(global_step=step, epoch=step / 4),
        args=SimpleNamespace(device=torch.device("cpu"), output_dir=f"out-{step}"),
        callback_handler=SimpleNamespace(callbacks=callbacks),
        current_flos=0,
    )


def on_its_way(step: int) -> Any:
    found = trainer(step)
    found._tr_loss, found._total_loss_scalar = torch.tensor(0.1), 12.25
    found._globalstep_last_logged, found._initial_global_step = step - 1, 0
    return found


def test_a_worker_that_joins_counts_and_averages_on_from_where_the_others_are() -> None:
    theirs = on_its_way(7)
    there, here = TrainerProgress(theirs), TrainerProgress(own := trainer())
    there._runs, there.usual_items = True, 62.0
    here.load_state_dict(there.state_dict())
    assert here.loaded and here.state_dict() == there.state_dict()
    # The loop begins, with nothing.
    own._tr_loss = torch.tensor(0.0)
    here.run()
    assert own.state.global_step == 7 and here.usual_items == 62.0
    assert torch.equal(own._tr_loss, theirs._tr_loss) and own._globalstep_last_logged == 6
    assert here.state_dict() == there.state_dict()


def test_the_log_is_that_of_rank_0_with_its_times() -> None:
    rank_0, other = trainer(), trainer()
    rank_0.state.log_history = [{"loss": 2.0, "runtime": 0.5, "norm": torch.tensor(3.0), "by": "rank 0"}]
    other.state.log_history = [{"loss": 2.0, "runtime": 0.7}]
    said: list[Any] = []

    def broadcast(value: Any) -> Any:
        said.append(value)
        return said[0]

    found = [TrainerCallbackStates(rank_0), TrainerCallbackStates(other)]
    for each in found:
        each.agree_on_log(broadcast)
    other.state.log_history.append({"mine": 1.0})
    assert found[0].state_dict() == found[1].state_dict()
    assert found[1].state_dict()["log_history"] == [{"loss": 2.0, "runtime": 0.5, "norm": 3.0, "by": "rank 0"}]


def test_callbacks_with_a_state_have_it_on_a_worker_that_joins(caplog: pytest.LogCaptureFixture) -> None:
    patient, odd = EarlyStoppingCallback(3), EarlyStoppingCallback(3)
    patient.early_stopping_patience_counter = 2
    odd.state = lambda: {"args": {}, "attributes": {"what": object()}}
    given = TrainerCallbackStates(trainer(5, patient, odd))
    given.output_dir = "out-of-rank-0"
    own = trainer(0, EarlyStoppingCallback(3), EarlyStoppingCallback(3))
    with caplog.at_level(logging.WARNING):
        taken = TrainerCallbackStates(own)
        taken.load_state_dict(given.state_dict())
        given.state_dict()
    assert own.callback_handler.callbacks[0].early_stopping_patience_counter == 2
    assert own.args.output_dir == "out-of-rank-0"
    assert caplog.text.count("does not follow the job") == 1 and "1.EarlyStoppingCallback" in caplog.text
