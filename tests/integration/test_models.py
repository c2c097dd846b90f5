"""P1 on training scripts of all kinds: the final state is the same bits with one worker, with three, and after a loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from craft.settings.rundir import RunDir
from craft.testing.faults import PlacedFault

from .jobs import SCRIPTS, Jobs, describe

MODELS = SCRIPTS / "models"

ARGUMENTS = {"vision": ["--loaders", "2"], "text": [], "pair": []}
"""Of the runs with several workers; the one with a single worker has none."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_any_number_of_workers_and_a_loss_in_the_middle_give_the_same_bits(jobs: Jobs, name: str) -> None:
    script = MODELS / f"{name}.py"

    alone = jobs.run(script, workers=1)
    assert alone.exit_code == 0, describe(alone)
    three = jobs.run(script, *ARGUMENTS[name], workers=3)
    three.assert_exact(alone.digest, faults=0)
    killed = PlacedFault(point="batch", worker="w1", step=4, occurrence=2)
    struck = jobs.run(script, *ARGUMENTS[name], workers=3, faults=[killed])
    struck.assert_exact(alone.digest, faults=1)


def test_the_gradient_is_the_mean_over_the_global_batch_of_all_workers(jobs: Jobs) -> None:
    """The script itself compares it with plain PyTorch: uneven microbatches, a partial batch, and weights by tokens."""
    result = jobs.run(MODELS / "mean.py", workers=3)

    assert result.exit_code == 0, describe(result)


def test_the_exchange_begins_while_backward_goes_on(jobs: Jobs) -> None:
    """The script itself holds up its backward until the first blocks have been sent."""
    result = jobs.run(MODELS / "overlap.py", workers=3, environment={"CRAFT_BUCKET_MB": "0.01"})

    assert result.exit_code == 0, describe(result)


def test_workers_that_begin_with_other_parameters_get_those_of_one_and_are_warned(jobs: Jobs) -> None:
    result = jobs.run(MODELS / "unequal.py", workers=3)

    assert result.exit_code == 0, describe(result)
    (unequal,) = result.events("ParametersUnequal")
    source = unequal["source"]
    others = {"w0", "w1", "w2"} - {source}
    assert (set(unequal["worker_ids"]), unequal["first"]) == (others, "model.weight")
    assert f"began with other parameters; all now have those of {source}" in result.output
    torch.manual_seed(int(source[1:]))
    expected = torch.nn.Linear(4, 1).weight[0].tolist()
    for worker_id in ("w0", "w1", "w2"):
        log = RunDir(result.run_dir).log(worker_id).read_text()
        assert f"differ from {source} (first: model.weight): copied those of {source}" in log
        assert f"{worker_id} begins step 0 with {expected}\n" in log
    assert len(result.digests) == 1


def test_bits_that_depend_on_the_worker_are_found_in_the_first_step(jobs: Jobs) -> None:
    result = jobs.run(MODELS / "uneven_bits.py", workers=3)

    assert result.exit_code == 1, describe(result)
    assert "microbatch 0 of step 0 gave different bits on w" in result.output, describe(result)
    assert " | w1: they need the same data, the same kind of device" in result.output
    assert "Traceback" not in result.output
    (diverged,) = result.events("StateDiverged")
    assert diverged["step"] == 0
    assert all(not commits for commits in result.run.commits.values())


def test_the_comparison_of_bits_can_be_switched_off(jobs: Jobs) -> None:
    result = jobs.run(MODELS / "uneven_bits.py", workers=3, options=["--no-check-bits"])

    assert result.exit_code == 0, describe(result)
    assert len(result.digests) == 1


def test_weights_that_changed_silently_on_one_worker_are_found_within_the_period(jobs: Jobs) -> None:
    """P3: every byte is compared within (bytes of state / digest_bytes) steps."""
    num_bytes, digest_bytes = 4 * (64 * 64 + 64), 2048
    period = -(-num_bytes // digest_bytes)

    result = jobs.run(MODELS / "astray.py", workers=3, environment={"CRAFT_DIGEST_BYTES": str(digest_bytes)})

    assert result.exit_code == 1, describe(result)
    (diverged,) = result.events("StateDiverged")
    found = diverged["step"]
    assert 8 <= found < 8 + period
    assert f"after {found} steps the state differs between " in result.output, describe(result)
    assert " | w2 (in or near model.weight): code between the steps must do the same on every worker" in result.output
    assert {commit.step for commits in result.run.commits.values() for commit in commits} == set(range(found))


def test_weights_that_changed_silently_are_found_at_the_next_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    """P3: every byte of the state is compared in the first step after a checkpoint was taken."""
    store = ("--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "10 steps")
    result = jobs.run(MODELS / "astray.py", workers=3, options=store, environment={"CRAFT_DIGEST_BYTES": "16"})

    assert result.exit_code == 1, describe(result)
    (diverged,) = result.events("StateDiverged")
    assert diverged["step"] == 10
    assert "after 10 steps the state differs between w0, w1 | w2: code between the steps must" in result.output
