"""Jobs in which the answer to a loss is chosen by what it costs (``--on-loss auto``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from craft.testing import Fault

from .jobs import TRAIN, Job, Jobs, References, Result, describe, wait_for


def start(jobs: Jobs, folder: Path, steps: int, **more: Any) -> Job:
    """Two workers; a step takes about 40 ms with both and 80 ms with one, until there is a file ``hurry``."""
    arguments = ("--steps", str(steps), "--slow-until", str(folder / "hurry"))
    options = ("--on-loss", "auto", *more.pop("options", ()))
    environment = {"CRAFT_MAX_RESTARTS": "10"}
    return jobs.start(TRAIN, *arguments, workers=2, options=options, environment=environment, **more)


def _step_of(job: Job, worker_id: str) -> int:
    return sum(each["step"] for each in job.client.get_status()["workers"] if each["worker_id"] == worker_id)


def reason(result: Result) -> str:
    """Why the generation after the loss is as it is."""
    (found,) = [line["reason"] for line in result.run.journal if "lost (killed" in line.get("reason", "")]
    return str(found)


def test_near_the_end_of_a_job_nobody_is_started_in_the_place_of_a_lost_worker_and_it_says_why_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    (tmp_path / "hurry").touch()
    result = start(jobs, tmp_path, 60, faults=[Fault(point="update", step=48, worker="w1")]).wait()
    result.assert_exact(references.digest("--steps", "60"), faults=1, steps=60)
    said = reason(result)
    assert "1 survivor redoes its microbatches; to redo costs" in said, describe(result)
    assert "steps are left" in said and "a replacement is assumed to take 10 s" in said
    assert not (result.run_dir / "workers" / "w2").exists()
    (figures,) = result.events("TimesMeasured")
    assert figures["total_steps"] == 60 and figures["step_s"][0][0] == 2


@pytest.mark.long
def test_far_from_the_end_somebody_is_started_and_the_time_it_took_is_measured_P1(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    job = start(jobs, tmp_path, 300)
    job.reach_step(15)
    job.kill("w1")
    wait_for(lambda: _step_of(job, "w2"), "the next one has said that it committed a step")
    job.kill("w2")
    wait_for(
        lambda: len([line for line in job.journal() if line.get("event") == "TimesMeasured"]) == 2, "it is measured"
    )
    (tmp_path / "hurry").touch()
    result = job.wait()
    result.assert_exact(references.digest("--steps", "300"), faults=2, steps=300)
    first, second = result.events("TimesMeasured")
    assert first["restart_s"] is None and 0 < second["restart_s"] < 30
    assert "to fill the slot costs" in describe(result)
