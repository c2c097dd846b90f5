"""Workers that meet after a loss, though strangers speak to their rendezvous stores and the system gives these no files."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from craft.testing import Fault

from .jobs import TRAIN, Job, Jobs, References, Result, describe, wait_for

LONGER = ("--steps", "60")
WITHOUT_FILES = "without_files"
"""Once this file is in the run directory, the store of w0 can take no connection for a while."""


def start(jobs: Jobs, hurry: Path, without_files_s: float) -> Job:
    fault = Fault(
        point="store.accept",
        kind="error",
        errno="EMFILE",
        seconds=without_files_s,
        worker="w0",
        after_file=WITHOUT_FILES,
    )
    return jobs.start(TRAIN, *LONGER, "--slow-until", str(hurry), workers=3, faults=[fault])


def lose_one(job: Job) -> None:
    """Lose a worker while the store of rank 0 takes nobody."""
    (job.run_dir / WITHOUT_FILES).touch()
    # The store waits in an accept that succeeds; the next one fails.
    socket.create_connection(place_of(job, "w0")).close()
    wait_for(lambda: (job.run_dir / "struck" / "0").exists(), "the store can take nobody")
    job.kill("w2")


def place_of(job: Job, worker_id: str) -> tuple[str, int]:
    members = [line["member"] for line in job.journal() if line.get("event") == "WorkerJoined"]
    return next((each["address"], each["store_port"]) for each in members if each["worker_id"] == worker_id)


def say_as_a_stranger(place: tuple[str, int], number: int) -> None:
    """What a store without authentication took for a whole generation of that number, and sent all older ones away."""
    message = msgspec.msgpack.encode([number, "x", 0, 1, 1.0, {}])
    with socket.create_connection(place) as connection:
        connection.sendall(len(message).to_bytes(8, "little") + message)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def met_again(result: Result) -> list[dict[str, object]]:
    return [line for line in result.run.journal if line.get("action") == "Reconfigure" and line["again"]]


def test_strangers_and_seconds_without_files_keep_nobody_from_meeting_P1_P6(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    job = start(jobs, tmp_path / "hurry", without_files_s=3.0)
    job.reach_step(3)
    for worker_id in ("w0", "w1", "w2"):
        say_as_a_stranger(place_of(job, worker_id), 1 << 62)
    lose_one(job)
    wait_for(lambda: len(job.members()) == 2, "the others go on")
    (tmp_path / "hurry").touch()

    result = job.wait()

    result.assert_exact(references.digest(*LONGER), faults=1, steps=60)
    assert not met_again(result), describe(result)


@pytest.mark.long
def test_a_worker_whose_store_takes_nobody_any_more_is_replaced_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    job = start(jobs, tmp_path / "hurry", without_files_s=1e6)
    job.reach_step(3)
    lose_one(job)
    (tmp_path / "hurry").touch()

    # Each generation that does not open takes 15 s.
    result = job.wait(300)

    result.assert_exact(references.digest(*LONGER), faults=2, steps=60)
    assert len(met_again(result)) == 4, describe(result)
    (blamed,) = [line for line in result.run.journal if line.get("action") == "DeclareLost"]
    assert blamed["worker_id"] == "w0" and "met 4 times again in vain" in blamed["reason"]
