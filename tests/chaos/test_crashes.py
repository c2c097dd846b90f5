"""Whole jobs that are killed at random instants while they write checkpoints, again and again (P1, P7).

    CRASHES=200 pytest tests/chaos/test_crashes.py -s

Every process gets SIGKILL at once: in the middle of a write, of a rename, of garbage collection, of a start. The newest listed
checkpoint must verify each time, and what finally ends has the bits of a job in which nothing happened.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.jobs import Job, Jobs, References, describe, wait_for
from tests.integration.stores import kill_all, manifests
from tests.small_disk import mounted

from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.verify import verify
from craft.snapshots.store.tiers import open_tiers

CRASHES = int(os.environ.get("CRASHES", "3"))
SEED = int(os.environ.get("CRASHES_SEED", "1"))
SCRIPT = Path(__file__).parent / "scripts" / "crashes.py"
STEPS = ("--steps", "1000000")
"""So many that a job is never done before it is killed for the last time."""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path / "jobs")
    yield jobs
    jobs.end()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, small enough to be filled at once."""
    with mounted(tmp_path / "disk", "32m") as place:
        yield place


def check_newest(url: str) -> int:
    """The newest listed checkpoint is whole; returns its step, 0 if there is none."""
    tiers = open_tiers(url)
    found = candidates(tiers, lambda rejected: pytest.fail(f"listed, and cannot be read: {rejected}"))
    if not found:
        return 0
    assert verify(tiers, found[0]) == []
    return found[0].step


def fill(disk: Path) -> None:
    """Leave no room at all."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def has_begun(job: Job, store: Path, before: set[str]) -> bool:
    """Whether it has written anything, or has come to its end."""
    return job.process.poll() is not None or {path.name for path in manifests(store)} != before


def series(jobs: Jobs, references: References, url: str, store: Path, draw: random.Random, full: bool) -> None:
    """``full``: on some of the starts the disk is full for a while."""
    reached = 0
    for number in range(CRASHES):
        workers = draw.choice([1, 2, 3])
        options = (
            "--checkpoints",
            url,
            "--checkpoint-every",
            f"{draw.choice([1, 2, 5])} steps",
            "--checkpoint-keep",
            "2",
        )
        job = jobs.start(SCRIPT, *STEPS, workers=workers, options=(*options, "--resume"))
        before = {path.name for path in manifests(store)}
        wait_for(lambda job=job, before=before: has_begun(job, store, before), "it writes checkpoints")  # type: ignore[misc]
        if full and draw.random() < 0.5:
            fill(store.parent)
            time.sleep(draw.uniform(0.0, 0.5))
        time.sleep(draw.uniform(0.0, 0.6))
        assert job.process.poll() is None, f"it ended by itself in round {number}" + describe(job.wait())
        kill_all(job)
        (store.parent / "filler").unlink(missing_ok=True)
        step = check_newest(str(store))
        assert step >= reached, f"round {number}: step {reached} was listed before, and now the newest is {step}"
        print(f"round {number}: {workers} workers, killed after the checkpoint of step {step}", flush=True)
        reached = step
    assert reached > 0
    steps = ("--steps", str(reached + 20))
    result = jobs.run(SCRIPT, *steps, workers=2, options=("--checkpoints", url, "--resume"))
    result.assert_exact(references.digest_of(SCRIPT, *steps, workers=1), faults=0)


def test_a_job_killed_at_any_instant_goes_on_from_a_whole_checkpoint_P1_P7(
    jobs: Jobs, disk: Path, tmp_path: Path
) -> None:
    store = disk / "store"
    references = References(Jobs(tmp_path / "references"), tmp_path)
    series(jobs, references, str(store), store, random.Random(SEED), full=True)


@pytest.mark.long
def test_the_same_with_a_store_that_fails_every_second_request_P1_P7(jobs: Jobs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    references = References(Jobs(tmp_path / "references"), tmp_path)
    series(jobs, references, f"flaky://{store}", store, random.Random(SEED + 1), full=False)
