"""Let the next rank 0 continue the logs and Lightning's checkpoints of a lost one.

``places`` and ``adopt`` make the paths the same on every worker after the first step; ``take_over`` is for a worker that
becomes rank 0 later.
"""

from __future__ import annotations

import csv
import os
from typing import Any

Places = list[list[Any]]


def places(trainer: Any) -> Places:
    """Return where this worker would write: logger versions, checkpoint directories. Plain data."""
    versions = [_plain(getattr(each, "_version", None)) for each in trainer.loggers]
    directories = [_plain(getattr(each, "dirpath", None)) for each in trainer.checkpoint_callbacks]
    return [versions, directories]


def adopt(trainer: Any, found: Places) -> None:
    """Use rank 0's paths."""
    versions, directories = found
    for logger, version in zip(trainer.loggers, versions, strict=True):
        if version is not None and getattr(logger, "_experiment", None) is None:
            logger._version = version
    for callback, directory in zip(trainer.checkpoint_callbacks, directories, strict=True):
        if directory is not None:
            callback.dirpath = directory


def _plain(value: Any) -> int | str | None:
    return value if isinstance(value, int) or value is None else str(value)


def take_over(trainer: Any) -> None:
    """Continue files that another worker has begun."""
    for logger in trainer.loggers:
        # Other loggers begin a new file beside; this one would remove what it finds.
        if type(logger).__name__ == "CSVLogger" and logger._experiment is None:
            _continue(logger)


def _continue(logger: Any) -> None:
    path = os.path.join(logger.log_dir, "metrics.csv")
    if not logger._fs.isfile(path):
        return
    with logger._fs.open(path, "r", newline="") as file:
        # The last line may have been half written.
        lines = file.read().rpartition("\n")[0].splitlines()
    aside = f"{path}.before"
    logger._fs.mv(path, aside)
    experiment = logger.experiment
    with logger._fs.open(path, "w", newline="") as file:
        file.writelines(f"{line}\n" for line in lines)
    logger._fs.rm(aside)
    experiment.metrics_keys = next(csv.reader(lines[:1]), [])
