"""A bit of one worker's state changes by itself: checkpoints that may have it are not gone on from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .jobs import CRAFT, SCRIPTS, Jobs, References, describe
from .stores import manifests

SCRIPT = SCRIPTS / "flip.py"
SLICES = {"CRAFT_DIGEST_BYTES": "256"}
"""Eight slices: the flipped bit has its turn in step 24, but after the checkpoint of step 20 all of the state is compared."""


def ls(store: Path) -> str:
    done = subprocess.run([*CRAFT, "checkpoints", "ls", str(store)], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_polluted_checkpoint_is_not_gone_on_from_P1_P7(jobs: Jobs, references: References, tmp_path: Path) -> None:
    store, near = tmp_path / "store", tmp_path / "near"
    options = ("--checkpoints", str(store), "--checkpoint-every", "5 steps", "--checkpoint-keep", "9")
    flipped = jobs.run(
        SCRIPT, "--flip-after", "16", "--await", str(store), workers=2, environment=SLICES,
        options=(*options, "--checkpoint-local", str(near)),
    )  # fmt: skip
    (diverged,) = flipped.events("StateDiverged")
    assert flipped.exit_code == 1 and diverged["step"] == 20, describe(flipped)
    assert [path.stem.split("-")[1][-2:] for path in manifests(store)] == ["05", "10", "15", "20"]
    assert [path.name for path in (store / "suspect").iterdir()] == ["0000-000000000015-000000000020.json"]
    assert [path.name for path in (near / "suspect").iterdir()] == ["0000-000000000015-000000000020.json"]
    listed = ls(store).splitlines()
    assert [("suspect" in line) for line in listed[2:]] == [True, False, False, False, True]
    assert "in step 20 bits differed between workers" in listed[-1] and "after 15 steps" in listed[-1]

    resumed = jobs.run(SCRIPT, workers=2, options=(*options, "--resume"))
    resumed.assert_exact(references.digest_of(SCRIPT, workers=1), faults=0)
    assert [event["step"] for event in resumed.events("CheckpointRejected")] == [20]
    (restored,) = resumed.events("CheckpointRestored")
    assert (restored["step"], restored["branch"]) == (15, 1)
    assert "checkpoint of step 20 cannot be used: it may hold wrong bits" in resumed.output
    assert all("suspect" not in line for line in ls(store).splitlines() if " 1 " in line)
