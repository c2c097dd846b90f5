"""P1 and P2 for each kind of data: one worker undisturbed, three with losses and joins, and a resume with two."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from craft.settings.rundir import RunDir
from craft.telemetry.records import metric_lines
from craft.testing.faults import PlacedFault

from .jobs import Jobs, Result, describe
from .test_data import DATA, plans, used

KINDS = DATA / "kinds.py"
KILLS = [PlacedFault(point="batch", rank=1, step=5), PlacedFault(point="before_acknowledge", rank=0, step=11)]
REPLACED = {"CRAFT_MAX_RESTARTS": "5"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tar files with eight samples each."""
    folder = tmp_path_factory.mktemp("shards")
    generator = torch.Generator().manual_seed(0)
    for shard in range(8):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(8):
                buffer = io.BytesIO()
                torch.save(torch.randn(4, generator=generator), buffer)
                entry = tarfile.TarInfo(f"{8 * shard + number:04d}.pt")
                entry.size = buffer.tell()
                tar.addfile(entry, io.BytesIO(buffer.getvalue()))
    return folder


def samples(result: Result) -> list[list[int]]:
    """The samples of each committed step, in the order of microbatches."""
    found = used(result)
    return [
        [int(each) for mb in sorted(plan) for said in found[step, mb][:1] for each in said.strip("[]").split(", ")]
        for step, plan in sorted(plans(result).items())
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "iterable",
        pytest.param("buckets", marks=pytest.mark.long),
        pytest.param("stateful", marks=pytest.mark.long),
        pytest.param("lanes", marks=pytest.mark.long),
        pytest.param("loader", marks=pytest.mark.long),
        pytest.param("weighted", marks=pytest.mark.long),
        pytest.param("shards", marks=pytest.mark.long),
    ],
)
def test_data_of_this_kind_is_the_same_with_losses_and_joins_P1_P2(jobs: Jobs, shards: Path, kind: str) -> None:
    arguments = (kind, "--shards", str(shards))
    alone = jobs.run(KINDS, *arguments, workers=1)
    assert alone.exit_code == 0, describe(alone)
    result = jobs.run(KINDS, *arguments, "--workers", "3", workers=3, faults=KILLS, environment=REPLACED)
    steps = len(alone.run.commits["w0"])
    result.assert_exact(alone.digest, faults=2, steps=steps)
    assert samples(result) == samples(alone)
    joined = [worker for worker in result.run.commits if worker not in ("w0", "w1", "w2")]
    assert any(commit.microbatches for worker in joined for commit in result.run.commits[worker]), describe(result)
    per_pass = Counter(number for step in samples(alone) for number in step)
    if kind in ("iterable", "stateful", "buckets"):
        assert per_pass == Counter(dict.fromkeys(range(58), 4))
    if kind in ("lanes", "shards"):
        assert set(per_pass) == set(range(64))
    if kind == "loader":
        assert steps == 28, "58 samples: the last 2 of each pass are left out"


@pytest.mark.parametrize(
    "kind", ["stateful", pytest.param("iterable", marks=pytest.mark.long), pytest.param("buckets", marks=pytest.mark.long)]
)  # fmt: skip
def test_a_checkpoint_at_the_end_of_an_epoch_is_resumed_by_another_number_of_workers_P1(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    """Every second epoch has one, exactly at its end; the job goes on in the third."""
    alone = jobs.run(KINDS, kind, workers=1)
    store = tmp_path / "store"
    arguments = (kind, "--checkpoints", str(store), "--every", "2 epochs")
    first = jobs.run(KINDS, *arguments, workers=2)
    assert first.exit_code == 0 and first.digest == alone.digest, describe(first)
    epochs = [round(line["epoch"]) for line in read_metrics(first)]
    ends = [step + 1 for step in range(len(epochs)) if step + 1 == len(epochs) or epochs[step] < epochs[step + 1]]
    taken = sorted(line["step"] for line in first.events("CheckpointWritten"))
    assert taken == [ends[1], ends[3]], describe(first)
    resumed = jobs.run(KINDS, *arguments, workers=3, options=("--resume", str(ends[1])), environment=REPLACED,
                       faults=[PlacedFault(point="before_acknowledge", rank=1, step=ends[1] + 3)])  # fmt: skip
    resumed.assert_exact(alone.digest, faults=1)
    assert samples(resumed) == samples(alone)[ends[1] :]


def read_metrics(result: Result) -> list[dict[str, float]]:
    return list(metric_lines.read_metrics(RunDir(result.run_dir).metrics))
