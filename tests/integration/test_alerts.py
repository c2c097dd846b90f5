"""Alerts end to end: Prometheus, Alertmanager and a job, with the files that are shipped for them."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from craft.settings.rundir import RunDir
from craft.testing import Fault
from craft.testing.faults import struck
from craft.wire.auth import bearer, read_token

from .jobs import CRAFT, TRAIN, Job, Jobs, References, wait_for
from .monitoring import DEPLOY, Exporter, Monitoring, find_obstacle
from .scene import Scene

STEPS = 150


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    obstacle = find_obstacle()
    if obstacle is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(obstacle)
    exporter = Exporter()
    yield exporter
    exporter.end()


def _lines(job: Job, event: str, **fields: object) -> list[dict[str, Any]]:
    return [
        line
        for line in job.journal()
        if line.get("event") == event and all(line.get(key) == value for key, value in fields.items())
    ]


def test_an_alert_of_prometheus_drains_one_worker_and_replaces_another_and_training_goes_on_exact_P1_P8(
    jobs: Jobs, references: References, exporter: Exporter, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    job = jobs.start(
        TRAIN, "--steps", str(STEPS), "--slow-until", str(hurry), workers=3,
        options=["--config", str(DEPLOY / "craft.toml")], environment={"CRAFT_MAX_RESTARTS": "50"},
    )  # fmt: skip
    job.reach_step(2)
    exporter.xids = {0: 0, 1: 0, 2: 0}
    monitoring = Monitoring(tmp_path / "monitoring", RunDir(job.run_dir), exporter)
    try:
        exporter.xids = {0: 0, 1: 48, 2: 0}
        wait_for(lambda: _lines(job, "WorkerLeft", worker_id="w1"), "the worker with the broken memory left", 60)
        exporter.xids = {0: 0, 1: 48, 2: 79}
        wait_for(lambda: _lines(job, "WorkerLost", worker_id="w2"), "the worker without a GPU is lost", 60)
        wait_for(lambda: "w3" in job.committing(), "another one is in its place and has committed a step", 60)
        # The GPU is back: that is told, and ends nothing.
        exporter.xids = {0: 0, 1: 48, 2: 0}
        wait_for(lambda: _lines(job, "AlertResolved", name="GpuOffTheBus"), "the alert is resolved", 60)
        _check_metrics(job)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{monitoring.logs()}") from None
    finally:
        monitoring.end()
    hurry.touch()
    result = job.wait()
    result.assert_exact(references.digest("--steps", str(STEPS), workers=1), faults=1, steps=STEPS)
    # Prometheus evaluates, and Alertmanager sends, again and again: each alert is answered once.
    fired = [(line["name"], line["worker_id"], line["answer"]) for line in result.events("AlertFired")]
    assert fired == [("GpuXidErrors", "w1", "drain"), ("GpuOffTheBus", "w2", "fail")]
    assert result.events("WorkerLost")[0]["source"] == "alert"
    assert "has fallen off the bus" in result.events("WorkerLost")[0]["reason"]


def test_whoever_waits_for_a_living_worker_that_sleeps_is_freed_by_a_word_from_outside_P1_P5(
    jobs: Jobs, references: References
) -> None:
    """No limit runs out: only what is reported frees the others, and the one that sleeps is ended."""
    asleep = Fault(point="forward", kind="sleep", step=5, worker="w1", seconds=600)
    job = jobs.start(TRAIN, "--steps", "10", workers=3, faults=[asleep])
    wait_for(lambda: struck(job.run_dir), "the worker sleeps")
    outcome = _post(job, _alert("Slow", craft_answer="abort"))["outcomes"][0]
    assert [action["action"] for action in outcome["actions"]] == ["Reconfigure"]
    # All meet again, which is no use while one sleeps on; going on without it is.
    outcome = _post(job, _alert("Asleep", worker="w1", craft_answer="fail"))["outcomes"][0]
    assert [action["action"] for action in outcome["actions"]] == ["DeclareLost", "Fence", "Reconfigure"]
    result = job.wait()
    result.assert_exact(references.digest("--steps", "10", workers=1), faults=1, steps=10)
    assert {line["worker_id"] for line in result.events("WorkerFinished")} == {"w0", "w2"}
    assert "w1" in {line["worker_id"] for line in result.events("WorkerEnded")}


def test_a_mistake_in_the_rules_is_named_before_anything_is_started(scene: Scene, tmp_path: Path) -> None:
    rules = tmp_path / "craft.toml"
    rules.write_text('[[alerts]]\nanswer = "drian"\n')
    said = scene.refused("--config", str(rules))
    assert str(rules) in said
    assert "[[alerts]] number 1" in said
    assert "did you mean drain?" in said
    command = [*CRAFT, "run", "--config", str(rules), "--dir", str(tmp_path / "run"), str(TRAIN)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, "did you mean drain?" in found.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def _alert(name: str, **labels: str) -> dict[str, Any]:
    alert = {"status": "firing", "labels": {"alertname": name, **labels}, "startsAt": "2026-01-01T00:00:00Z"}
    return {"version": "4", "groupKey": "g", "alerts": [{**alert, "fingerprint": name}]}


def _post(job: Job, body: dict[str, Any]) -> dict[str, Any]:
    run = RunDir(job.run_dir)
    headers = {**bearer(read_token(run.token)), "Content-Type": "application/json"}
    request = urllib.request.Request(f"{run.read_address()}/v1/alerts", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def _check_metrics(job: Job) -> None:
    """Prometheus' own tool finds nothing to complain about."""
    run = RunDir(job.run_dir)
    request = urllib.request.Request(f"{run.read_address()}/metrics", headers=bearer(read_token(run.token)))
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read()
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (found.returncode, found.stderr) == (0, b""), found.stderr.decode()


def test_the_shipped_files_are_accepted_by_the_programs_they_are_for(exporter: Exporter) -> None:
    for command in (
        ["promtool", "check", "rules", str(DEPLOY / "craft_rules.yml")],
        ["promtool", "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml")],
        ["amtool", "check-config", str(DEPLOY / "alertmanager.yml")],
    ):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


SLOW_RULE = """
rule_files: [{rules}]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {{series: 'craft_worker_microbatch_seconds{{instance="a",worker_id="w0"}}', values: '0.010x20'}}
      - {{series: 'craft_worker_microbatch_seconds{{instance="a",worker_id="w1"}}', values: '0.012x20'}}
      - {{series: 'craft_worker_microbatch_seconds{{instance="a",worker_id="w2"}}', values: '0.011x3 0.031x16'}}
      - {{series: 'craft_worker_microbatch_seconds{{instance="b",worker_id="w0"}}', values: '5x20'}}
      - {{series: 'craft_worker_microbatch_seconds{{instance="b",worker_id="w1"}}', values: '5x20'}}
    alert_rule_test:
      - {{eval_time: 90s, alertname: CraftStraggler, exp_alerts: []}}
      - eval_time: 150s
        alertname: CraftStraggler
        exp_alerts:
          - exp_labels: {{severity: warning, instance: a, worker_id: w2}}
            exp_annotations:
              summary: A microbatch takes 0.031 s on worker w2, over twice the median.
"""


def test_the_rule_for_slow_workers_fires_for_whoever_takes_over_twice_the_median(
    exporter: Exporter, tmp_path: Path
) -> None:
    """Of its own job, and only after a while."""
    tests = tmp_path / "tests.yml"
    tests.write_text(SLOW_RULE.format(rules=DEPLOY / "craft_rules.yml"))

    found = subprocess.run(["promtool", "test", "rules", str(tests)], capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stdout + found.stderr
