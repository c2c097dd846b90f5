"""Files of earlier versions, in ``tests/fixtures/old``, are read by the code of today (P7)."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from craft.cli.main import main
from craft.settings.rundir import RunDir
from craft.snapshots.checkpoint.suspect import Suspicion, mark
from craft.snapshots.store.tiers import open_tiers
from craft.telemetry.history import fault_costs, read_run
from craft.testing.history import check, final_digests
from craft.wire.auth import ensure_token
from craft.wire.client import Client

from .jobs import CRAFT, Jobs, Result, describe
from .stores import manifests

FIXTURES = Path(__file__).parents[1] / "fixtures/old"
VERSIONS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
TRAIN = FIXTURES / "train.py"


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what one version left."""
    shutil.copytree(FIXTURES / request.param, tmp_path / "old")
    for name in ("finished", "cut"):
        # These two are of the machine that it ran on. Nobody answers there.
        (tmp_path / "old" / name / "run/address").write_text("http://127.0.0.1:9\n")
        ensure_token(RunDir(tmp_path / "old" / name / "run").token)
    return tmp_path / "old"


def craft(*args: str | Path) -> str:
    done = CliRunner().invoke(main, [*map(str, args)], prog_name="craft")
    assert done.exit_code == 0, done.output
    return done.output


def digest(old: Path) -> str:
    """The state with which the job ended that nobody cut off."""
    (found,) = set(final_digests(read_run(old / "finished/run")).values())
    assert found is not None
    return found


def go_on(jobs: Jobs, store: Path, *resume: str) -> Result:
    options = ("--checkpoints", str(store), "--checkpoint-every", "4 steps", "--resume", *resume)
    return jobs.run(TRAIN, workers=1, options=options)


def test_the_story_of_an_old_run_is_told(old: Path) -> None:
    for name, generations in (("finished", 3), ("cut", 3)):
        run = read_run(old / name / "run")
        assert len(fault_costs(run)) == 1 and len(run.commits) == generations
        assert "w1 was lost: killed by SIGKILL" in craft("why", "--dir", old / name / "run")
        assert "CheckpointWritten" in craft("events", "--dir", old / name / "run")
    assert check(old / "finished/run", digest(old)).violations == ()


def test_a_lighthouse_begins_on_an_old_run_directory(old: Path) -> None:
    run = RunDir(old / "cut/run")
    run.address.unlink()
    command = [*CRAFT, "lighthouse", "--dir", str(run.path), "--workers", "2", "--config", str(run.config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as lighthouse:
        assert lighthouse.stdout is not None
        try:
            # Before that it may say something about the directory's mode, which git does not keep.
            said = list(itertools.takewhile(lambda line: "lighthouse listening" not in line, lighthouse.stdout))
            assert lighthouse.poll() is None, said
            status = Client.of_run(run).get_status()
            assert status["generation"] == 3 and {"w0", "w2"} <= {each["worker_id"] for each in status["workers"]}
            assert status["faults"] == 1 and status["checkpoints"]["last"]["step"] == 12
            told = [line.get("event") for line in Client.of_run(run).events()]
            assert told[-1] == "LighthouseStarted" and "FileDamaged" not in told
        finally:
            lighthouse.terminate()
            lighthouse.communicate()


def test_old_checkpoints_are_listed_verified_compared_and_exported(old: Path, tmp_path: Path) -> None:
    store = old / "cut/store"
    found = json.loads(craft("checkpoints", "ls", store, "--json"))
    assert [(each["step"], each["suspect"]) for each in found] == [(12, None), (7, None), (4, None)]
    assert craft("checkpoints", "verify", store).count("are as they were written") == 3
    assert "tensors differ" in craft("checkpoints", "diff", store, "4", "12")
    craft("checkpoints", "export", store, "--format", "torch", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["step"] == 12
    assert "would be removed" in craft("checkpoints", "gc", store, "--keep", "1", "--dry-run")


def test_a_job_goes_on_from_old_checkpoints_to_the_same_bits_P1(jobs: Jobs, old: Path) -> None:
    result = go_on(jobs, old / "cut/store")
    result.assert_exact(digest(old), faults=0)
    assert [event["step"] for event in result.events("CheckpointRestored")] == [12]
    assert len(result.run.commits["w0"]) == 4


def test_a_place_whose_manifests_are_gone_is_told_and_the_job_begins_anew(jobs: Jobs, old: Path) -> None:
    for path in manifests(old / "cut/store"):
        path.unlink()
    result = go_on(jobs, old / "cut/store")
    result.assert_exact(digest(old), faults=0, steps=16)
    assert "holds parts of checkpoints and lists none" in result.output


@pytest.mark.long
def test_where_all_may_hold_wrong_bits_the_job_goes_on_only_if_it_is_told_from_which(jobs: Jobs, old: Path) -> None:
    store = old / "cut/store"
    mark([open_tiers(str(store)).durable], Suspicion(branch=0, after=3, step=13, reason="a bit flipped"))
    refused = go_on(jobs, store)
    assert refused.exit_code == 2, describe(refused)
    assert "may hold wrong bits (of steps 12, 7, 4)" in refused.output
    assert "Name a step to go on from it all the same: --resume 12" in refused.output
    forced = go_on(jobs, store, "7")
    forced.assert_exact(digest(old), faults=0)
    assert "warning: goes on from the checkpoint of step 7, as --resume 7 says" in forced.output
    (restored,) = forced.events("CheckpointRestored")
    assert (restored["step"], restored["branch"]) == (7, 1)
