"""Features of torch in sharded jobs: one worker is lost and replaced, and the end has the bits of one replica alone (P1)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from craft.testing import Fault
from craft.testing.history import check

from .jobs import SCRIPTS, Jobs, describe

FOLDER = SCRIPTS / "sharded_features"
STEPS = ("--steps", "30")


@dataclass(frozen=True)
class Case:
    """A script of the folder, and where it loses a worker."""

    script: str
    point: str
    rank: int
    arguments: tuple[str, ...] = ()
    size: int = 2
    long: bool = True

    def __str__(self) -> str:
        return "-".join([self.script, *(each.strip("-") for each in self.arguments)])


CASES = [
    Case("precision", "before_clip", 1, long=False),
    Case("finetune", "update", 2, long=False),
    Case("tensor_parallel", "batch", 0, long=False),
    Case("uneven", "before_clip", 3),
    Case("uneven", "batch", 1, ("--reshard", "2"), size=4),
    Case("adversaries", "update", 0),
    Case("muon", "update", 1),
    Case("muon", "before_clip", 2),
    Case("compiled", "batch", 1, ("--backend", "aot_eager")),
    Case("compiled", "before_clip", 2),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, id=f"{each}-{each.point}", marks=[pytest.mark.long] if each.long else []) for each in CASES],
)
@pytest.mark.timeout(600)
def test_a_feature_of_torch_survives_a_loss_with_the_same_bits_P1(jobs: Jobs, case: Case) -> None:
    script, options = FOLDER / f"{case.script}.py", ["--workers-per-replica", str(case.size)]
    alone = jobs.run(script, *STEPS, *case.arguments, workers=case.size, options=options, limit_s=240)
    assert alone.exit_code == 0, describe(alone)

    job = jobs.start(
        script,
        *STEPS,
        "--slow",
        "0.2",
        *case.arguments,
        workers=2 * case.size,
        options=options,
        faults=[Fault(point=case.point, step=2, rank=case.rank)],
        environment={"CRAFT_MAX_RESTARTS": "50"},
    )
    job.wait_for_committing(2 * case.size + 1)
    (job.files.parent / "hurry").touch()
    result = job.wait(240)

    assert result.exit_code == 0, describe(result)
    assert check(result.run_dir, alone.run_dir).violations == (), describe(result)
    lost = {worker for line in result.run.journal if line.get("outcome") == "Fault" for worker in line["worker_ids"]}
    assert lost == set(result.struck.values()), describe(result)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("offload", "Cannot access accelerator device when none is available"),
        ("copy", "FSDP does not support deepcopy"),
        ("adafactor", "in-place operations that require placement changes are not supported"),
    ],
)
def test_what_torch_has_not_for_fsdp2_ends_the_job_with_its_sentence(jobs: Jobs, kind: str, sentence: str) -> None:
    """If a newer torch has it, the page about sharded models can say so."""
    result = jobs.run(FOLDER / "unusual.py", kind, workers=2, options=["--workers-per-replica", "2"])

    assert result.exit_code not in (0, None), describe(result)
    assert sentence in result.output + result.errors, describe(result)
