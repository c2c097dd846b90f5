"""Scripts of the shapes that people bring along, and the page that says what changes in them: docs/howto/coming_from_ddp.md."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from craft.testing.faults import PlacedFault

from .jobs import LIMIT_S, SCRIPTS, Jobs, describe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "coming_from_ddp.md"
EXAMPLE = ROOT / "examples" / "ddp" / "train_craft.py"
DDP = ROOT / "examples" / "ddp" / "train_ddp.py"
ARMED = SCRIPTS / "armed.py"
PAIRS = {
    "examples/ddp": (DDP, EXAMPLE),
    "ported_mnist": (SCRIPTS / "ported_mnist_plain.py", SCRIPTS / "ported_mnist.py"),
    "ported_gpt": (SCRIPTS / "ported_gpt_plain.py", SCRIPTS / "ported_gpt.py"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_line_counts_of_the_page_are_true(name: str) -> None:
    before, after = (path.read_text().splitlines() for path in PAIRS[name])
    changes = [line[:1] for line in difflib.ndiff(before, after)]
    row = f"| {len(before)} | {changes.count('-')} | {changes.count('+')} |"
    (found,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and f"`{name}`" in line]
    assert found.endswith(row), f"the page has {found!r}, and it is {row!r}"


def test_the_page_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"```python\n# (examples/ddp/\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["examples/ddp/train_ddp.py", "examples/ddp/train_craft.py"]
    for name, text in blocks:
        # Without the docstring.
        assert (ROOT / name).read_text().split('"""\n\n', 1)[1] == text


@pytest.mark.timeout(240)
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(DDP)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert re.search(r"epoch 2 loss 0\.\d+ accuracy 0\.\d+", done.stdout) and (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("script", "saved", "last_line"),
    [
        pytest.param(EXAMPLE, "model.pt", r"epoch 2 loss \S+ accuracy \S+", marks=pytest.mark.long),
        (PAIRS["ported_mnist"][1], "mnist.pt", r"test loss \S+ accuracy \S+"),
        (PAIRS["ported_gpt"][1], "ckpt.pt", r"step 23: train loss \S+, val loss \S+"),
    ],
    ids=["example", "mnist", "gpt"],
)
def test_a_ported_script_ends_with_the_same_bits_whoever_is_killed_P1(
    jobs: Jobs, script: Path, saved: str, last_line: str
) -> None:
    """Alone and undisturbed; and three workers, of which the leader is killed, and later the next leader."""
    alone = jobs.start(ARMED, str(script), workers=1)
    calm = alone.wait()
    assert calm.exit_code == 0, describe(calm)
    kills = [PlacedFault(point="batch", worker="w0", step=6), PlacedFault(point="blocks_sent", worker="w1", step=13)]
    disturbed = jobs.start(ARMED, str(script), workers=3, faults=kills, options=("--max-restarts", "5"))
    rough = disturbed.wait()
    rough.assert_exact(calm.digest, faults=2)
    # What the leaders printed is on the terminal, and is the same.
    shown = [re.findall(last_line, result.output)[-1] for result in (calm, rough)]
    assert shown[0] == shown[1], describe(rough)
    files = [torch.load(job.files.parent / saved) for job in (alone, disturbed)]
    states = [file.get("model", file) for file in files]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.long
@pytest.mark.parametrize("name", ["mnist", "gpt"])
def test_the_scripts_that_were_ported_run_as_they_were(tmp_path: Path, name: str) -> None:
    script = SCRIPTS / f"ported_{name}_plain.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and "loss" in done.stdout, done.stderr
