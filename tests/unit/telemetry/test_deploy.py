"""What is shipped for Prometheus and Grafana asks for metrics that there are, and craft.toml's example can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from craft.protocol.messages import StepTimes
from craft.settings.alerts import read_alerts
from craft.settings.files.toml_file import TomlFile
from craft.telemetry.metrics import Sample, registry_of, render

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
ALL = Sample(
    total_steps=1, state="running", workers={"member": 1}, metrics={"loss": 0.5}, checkpoint_step=1,
    lines={("event", "WorkerLost"): 1}, times={"w0": StepTimes()},
)  # fmt: skip
SAMPLE = re.compile(r"^(craft_\w+)", re.MULTILINE)
NAME = re.compile(r"\bcraft_\w+")


def _names() -> set[str]:
    return set(SAMPLE.findall(render(registry_of(lambda: ALL)).decode()))


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
