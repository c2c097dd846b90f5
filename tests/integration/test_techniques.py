"""A technique of another package, installed as packages are: its hooks in real workers, its policy in a real lighthouse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .jobs import CRAFT, TRAIN, Jobs, References, wait_for

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "thermal"
STEPS = 60
BROKEN = """
from craft.techniques import Hooks, Technique


class Clumsy(Technique):
    name = "clumsy"
    summary = "fails wherever it can"

    def policies(self):
        return (Wrong(),)

    def hooks(self, surroundings):
        return Stumble()


class Wrong:
    def decide(self, state, event):
        raise LookupError("policy of another package")


class Stumble(Hooks):
    def after_commit(self, moment):
        if moment.step == 2:
            raise LookupError("hook of another package")
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example, and a package that is broken, are installed."""
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(folder / "site"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    site = folder / "site"
    (site / "clumsy.py").write_text(BROKEN)
    info = site / "clumsy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: clumsy\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[craft.techniques]\nclumsy = clumsy:Clumsy\nabsent = nowhere_at_all:Absent\n"
    )
    return site


def environment(packages: Path) -> dict[str, str]:
    import os

    return {"PYTHONPATH": os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_a_hot_device_has_its_worker_leave_and_a_spare_takes_its_place_P1_P8(
    jobs: Jobs, references: References, packages: Path, tmp_path: Path
) -> None:
    (tmp_path / "craft.toml").write_text(
        f'[techniques.thermal]\nsensor = "{tmp_path}/sensor-{{local_rank}}"\nevery_s = 0.05\n'
    )
    hurry = tmp_path / "hurry"
    job = jobs.start(
        TRAIN, "--steps", str(STEPS), "--slow-until", str(hurry), workers=3,
        options=["--spares", "1", "--config", str(tmp_path / "craft.toml")], environment=environment(packages),
    )  # fmt: skip
    job.reach_step(2)
    (tmp_path / "sensor-1").write_text("95000\n")
    wait_for(lambda: [line for line in job.journal() if line.get("event") == "WorkerLeft"], "the hot worker left")
    (tmp_path / "sensor-1").write_text("40000\n")
    wait_for(lambda: "w3" in job.committing(), "the spare has its slot")
    hurry.touch()
    result = job.wait()
    result.assert_exact(references.digest("--steps", str(STEPS), workers=3), faults=0, steps=STEPS)
    (seen,) = result.events("ConditionSeen")
    assert (seen["technique"], seen["what"], seen["worker_id"], seen["value"]) == ("thermal", "heat", "w1", 95.0)
    (asked,) = [line for line in result.run.journal if line.get("action") == "RequestDrain"]
    assert "runs hot" in asked["reason"] and [line["worker_id"] for line in result.events("WorkerLeft")] == ["w1"]


def test_a_technique_that_fails_is_left_out_and_the_job_goes_on(
    jobs: Jobs, references: References, packages: Path
) -> None:
    job = jobs.start(
        TRAIN, "--steps", "8", workers=2, options=["--enable", "clumsy"], environment=environment(packages)
    )
    result = job.wait()
    result.assert_exact(references.digest("--steps", "8", workers=2), faults=0, steps=8)
    failed = {(line["where"].split()[0], line["error"].split(":")[0]) for line in result.events("TechniqueFailed")}
    assert failed == {("Wrong", "LookupError"), ("after_commit", "LookupError")}


def test_what_is_installed_is_listed_and_what_cannot_be_loaded_is_said(packages: Path) -> None:
    import os

    def craft(*arguments: str) -> subprocess.CompletedProcess[str]:
        own = {**os.environ, **environment(packages)}
        return subprocess.run([*CRAFT, *arguments], capture_output=True, text=True, env=own, timeout=60, check=False)

    listed = craft("techniques")
    assert listed.returncode == 0 and "(craft-thermal)" in listed.stdout
    assert "technique absent (nowhere_at_all:Absent) cannot be loaded" in listed.stderr
    told = {each["name"]: each for each in json.loads(craft("techniques", "--json").stdout)}
    assert told["thermal"]["origin"] == "craft-thermal" and "cannot be loaded" in told["absent"]["broken"]
    shown = craft("techniques", "thermal")
    assert "answers: AlertFired, ConditionSeen" in shown.stdout and "limit_c = 90.0" in shown.stdout
    refused = craft("run", "--enable", "absent", str(TRAIN))
    assert refused.returncode == 2 and "cannot be loaded" in refused.stderr
    unknown = craft("run", "--set", "thermal.limit=3", str(TRAIN))
    assert unknown.returncode == 2 and "did you mean limit_c?" in unknown.stderr
