"""Where checkpoints go: what the settings of the job say comes before what the script asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from craft.decide.step.interval import Every, parse_every
from craft.decide.techniques import Checkpoints, Divergence
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import ConfigError, Refused
from craft.worker.state.checkpoint_target import CheckpointRequest, check_every, check_tag, choose_target


def checkpoints(**settings: Any) -> Checkpoints:
    return Checkpoints(Checkpoints.Settings(**settings))


def rollback() -> Divergence:
    return Divergence(Divergence.Settings(answer="rollback"))


def test_without_a_place_none_are_taken() -> None:
    assert choose_target(CheckpointRequest(), Chosen([checkpoints()])) is None
    assert choose_target(CheckpointRequest(), Chosen()) is None


def test_the_script_says_where_and_how_often(tmp_path: Path) -> None:
    target = choose_target(CheckpointRequest(str(tmp_path), "500 steps", 7), Chosen([checkpoints()]))
    assert target is not None
    assert (target.every, target.keep) == (parse_every("500 steps"), 7)
    assert target.every != Every()


def test_what_the_job_was_started_with_comes_first(tmp_path: Path) -> None:
    given = checkpoints(url=str(tmp_path / "job"), keep=2)
    target = choose_target(CheckpointRequest(str(tmp_path / "script"), "500 steps", 7), Chosen([given]))
    assert target is not None
    assert (target.every, target.keep) == (parse_every("500 steps"), 2)
    assert str(tmp_path / "job") in target.tiers.url


def test_a_technique_that_is_off_takes_none_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_target(CheckpointRequest(str(tmp_path)), Chosen()) is None
    assert "technique checkpoints is switched off" in caplog.text


def test_going_back_needs_a_place_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--on-divergence rollback needs checkpoints to go back to"):
        choose_target(CheckpointRequest(), Chosen([checkpoints(), rollback()]))
    assert choose_target(CheckpointRequest(str(tmp_path)), Chosen([checkpoints(), rollback()])) is not None


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (CheckpointRequest(""), r"job.checkpoints\(''\): say where"),
        (CheckpointRequest("somewhere", keep=0), "keep=0"),
        (CheckpointRequest("somewhere", every="now and then"), "now and then"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: CheckpointRequest, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        choose_target(asked, Chosen([checkpoints()]))


@pytest.mark.parametrize("tag", ["", "x" * 65, "two\nlines", 7])
def test_a_tag_is_a_word(tag: str) -> None:
    with pytest.raises(ConfigError, match="a tag is a word of at most 64 characters"):
        check_tag(tag)


def test_no_tag_is_one_too() -> None:
    check_tag(None)
    check_tag("best")


def test_epochs_are_refused_where_the_data_has_none(tmp_path: Path) -> None:
    target = choose_target(CheckpointRequest(str(tmp_path), "2 epochs"), Chosen([checkpoints()]))
    assert (
        target is not None
        and check_every(target, is_stream=False) is target
        and check_every(None, is_stream=True) is None
    )
    with pytest.raises(Refused, match="a stream has one pass"):
        check_every(target, is_stream=True)
