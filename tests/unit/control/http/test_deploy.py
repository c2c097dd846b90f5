"""What is shipped for Prometheus and Grafana asks for metrics that there are, and craft.toml's example can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.control.http.test_metrics import EMPTY, worker

from craft.control.http.metrics import render
from craft.control.replay.checkpoints import CheckpointsStatus, LastCheckpoint
from craft.protocol.membership import Member
from craft.protocol.messages import StepTimes, WorkerReport
from craft.settings.alerts import read_alerts
from craft.settings.files.toml_file import TomlFile

DEPLOY = Path(__file__).resolve().parents[4] / "deploy"
LAST = LastCheckpoint(
    name="a", branch=0, step=1, url="file:///a", tag=None, total_bytes=1, new_bytes=1, seconds=1.0, time=1.0
)
ALL = replace(
    EMPTY, total_steps=1, workers=(worker("w0"),), metrics={"loss": 0.5}, checkpoints=CheckpointsStatus(last=LAST)
)
REPORTS = {"w0": WorkerReport(member=Member(worker_id="w0"), pid=1, times=StepTimes())}
SAMPLE = re.compile(r"^(craft_\w+)", re.MULTILINE)
NAME = re.compile(r"\bcraft_\w+")


def _names() -> set[str]:
    return set(SAMPLE.findall(render(ALL, {("event", "WorkerLost"): 1}, REPORTS).decode()))


def _expressions(value: Any) -> list[str]:
    """Everything in the dashboard that Prometheus is asked."""
    if isinstance(value, list):
        return [found for each in value for found in _expressions(each)]
    if not isinstance(value, dict):
        return []
    own = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
    return own + [found for each in value.values() for found in _expressions(each)]


def test_every_metric_of_the_dashboard_exists() -> None:
    asked = " ".join(_expressions(json.loads((DEPLOY / "grafana_dashboard.json").read_text())))
    assert len(set(NAME.findall(asked))) > 12
    assert set(NAME.findall(asked)) <= _names()


def test_every_metric_of_the_rules_exists() -> None:
    text = (DEPLOY / "craft_rules.yml").read_text()
    asked = set(NAME.findall(" ".join(re.findall(r"expr: (.*)", text))))
    assert "craft_worker_microbatch_seconds" in asked
    assert len(asked) > 5
    assert asked <= _names()


@pytest.mark.parametrize("name", ["GpuOffTheBus", "CraftNoProgress"])
def test_the_rules_of_the_example_are_for_alerts_that_are_shipped(name: str) -> None:
    assert any(rule.match.get("alertname") == name for rule in read_alerts(TomlFile(DEPLOY / "craft.toml")).rules)
    assert f"alert: {name}\n" in (DEPLOY / "craft_rules.yml").read_text()
