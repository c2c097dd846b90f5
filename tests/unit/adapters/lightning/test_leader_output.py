"""A worker that becomes rank 0 on the way goes on where the one before it wrote."""

from __future__ import annotations

import csv
import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from craft.adapters.lightning import leader_output

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def csv_logger(request: pytest.FixtureRequest) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"{request.param}.loggers").CSVLogger


def trainer(*loggers: Any, dirpath: str | None = None) -> Any:
    return SimpleNamespace(loggers=loggers, checkpoint_callbacks=[SimpleNamespace(dirpath=dirpath)])


def write(logger: Any, step: int, **values: float) -> None:
    logger.log_metrics(values, step=step)
    logger.save()


def test_the_next_rank_0_appends_to_the_file_of_the_first(csv_logger: Any, tmp_path: Path) -> None:
    first, second = csv_logger(tmp_path, version=0), csv_logger(tmp_path, version=0)
    write(first, 0, loss=1.0)
    write(first, 1, loss=0.5)
    file = Path(first.log_dir) / "metrics.csv"
    file.write_text(file.read_text() + "0.25,")
    leader_output.take_over(trainer(second))
    write(second, 2, loss=0.25, rate=0.1)
    with file.open() as opened:
        lines = list(csv.DictReader(opened))
    assert [(line["step"], line["loss"], line["rate"]) for line in lines] == [
        ("0", "1.0", ""), ("1", "0.5", ""), ("2", "0.25", "0.1"),
    ]  # fmt: skip
    assert [each.name for each in Path(first.log_dir).iterdir()] == ["metrics.csv"]


def test_who_has_logged_already_and_who_finds_no_file_has_nothing_to_take_over(csv_logger: Any, tmp_path: Path) -> None:
    first, second = csv_logger(tmp_path, version=0), csv_logger(tmp_path, version=1)
    write(first, 0, loss=1.0)
    leader_output.take_over(trainer(first, second))
    assert (Path(first.log_dir) / "metrics.csv").exists()
    assert second._experiment is None


def test_all_write_where_rank_0_does(csv_logger: Any, tmp_path: Path) -> None:
    rank_0 = trainer(csv_logger(tmp_path, version=3), dirpath="logs/version_3")
    other = trainer(csv_logger(tmp_path, version=4), dirpath="logs/version_4")
    leader_output.adopt(other, leader_output.places(rank_0))
    assert leader_output.places(other) == leader_output.places(rank_0) == [[3], ["logs/version_3"]]
