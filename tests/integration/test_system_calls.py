"""System calls of a job's processes fail for a while: training goes on where it can, and the job recovers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.system_calls import Rule, Switch

from craft.settings.rundir import RunDir

from .jobs import TRAIN, Job, Jobs, References, describe, wait_for

STEPS = ("--steps", "200")
REPLACED = {"CRAFT_MAX_RESTARTS": "20"}


def said(job: Job) -> str:
    return "".join(job.files.with_suffix(each).read_text() for each in (".out", ".err"))


def test_a_job_gets_through_calls_that_fail_for_a_while_P1(jobs: Jobs, references: References, tmp_path: Path) -> None:
    """Forks of workers and of the lighthouse, new connections, and all new files of the agent."""
    go, switch = tmp_path / "go", Switch(tmp_path / "switch")
    switch.set(Rule("fork", "EAGAIN", process="forkserver", times=2))
    job = jobs.start(
        TRAIN, *STEPS, "--slow-until", str(go), workers=3, environment={**REPLACED, **switch.environment()}
    )
    job.reach_step(3)
    assert len(switch.struck("fork", "forkserver")) == 2
    before = job.client.get_status()

    switch.set(
        Rule("fork", "ENOMEM"),
        *(Rule("accept", "EMFILE", process=each) for each in ("lighthouse", "agent", "worker")),
        *(Rule(call, "EMFILE", process="agent") for call in ("open", "socket", "pipe")),
    )
    os.kill(before["lighthouse"]["pid"], signal.SIGKILL)
    job.kill("w1")
    for process in ("keeper", "forkserver"):
        wait_for(lambda process=process: switch.struck("fork", process), f"no fork in the {process}")  # type: ignore[misc]
    steps = job.steps()
    switch.set()
    wait_for(lambda: len(job.committing()) > 3, "another worker takes part")
    job.reach_step(steps + 1)  # waited for: the leader writes this file, the worker above another one
    go.touch()
    result = job.wait()
    result.assert_exact(references.digest(*STEPS, workers=3), faults=1, steps=200)
    text = said(job) + RunDir(job.run_dir).lighthouse_log.read_text()
    assert "Traceback" not in text, describe(result)
    assert text.count("w0 cannot be started: Resource temporarily unavailable") == 1, text
    assert text.count("cannot fork a process to serve: Cannot allocate memory") == 1, text
