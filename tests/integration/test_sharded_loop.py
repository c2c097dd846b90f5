"""Sharded replicas beside their steps: evaluations and calls, audits of bits, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.testing import Fault
from craft.testing.history import check

from .jobs import SCRIPTS, Jobs, Result, describe

CALLS = SCRIPTS / "sharded_calls.py"
REFUSALS = SCRIPTS / "sharded_refusals.py"
AUDITED = SCRIPTS / "sharded_audit.py"
REPLICAS_OF_TWO = ["--workers-per-replica", "2"]


@pytest.fixture
def calls_alone(jobs: Jobs) -> Path:
    """The directory of an undisturbed job of one replica that makes calls."""
    result = jobs.run(CALLS, workers=2, options=REPLICAS_OF_TWO)
    assert result.exit_code == 0, describe(result)
    return result.run_dir


def line_with(result: Result, text: str) -> str:
    lines = [line for line in (result.output + result.errors).splitlines() if text in line]
    assert lines, describe(result)
    return lines[0]


LOST_IN = [
    # A batch of the evaluation before the update: in the middle of it, its replica has to redo it, and updates afterwards.
    ("score", 6, 1),
    # The other replica's, after the update.
    ("score", 5, 2),
    # All parts of a call are here, and it did not return yet.
    ("called", 5, 3),
]


@pytest.mark.parametrize(
    ("point", "step", "rank"),
    [LOST_IN[0], *(pytest.param(*each, marks=pytest.mark.long) for each in LOST_IN[1:])],
)
def test_evaluations_and_calls_give_the_same_results_after_a_loss_in_them_P1(
    jobs: Jobs, calls_alone: Path, point: str, step: int, rank: int
) -> None:
    result = jobs.run(CALLS, options=REPLICAS_OF_TWO, faults=[Fault(point=point, step=step, rank=rank)])

    assert result.exit_code == 0, describe(result)
    assert check(result.run_dir, calls_alone).violations == (), describe(result)
    assert any(line.get("outcome") == "Fault" for line in result.run.journal), describe(result)


@pytest.mark.long
def test_calls_and_evaluations_change_nothing_that_is_trained(jobs: Jobs) -> None:
    """FSDP2 leaves the parameters of the root gathered after an evaluation: they must not be used for the next step."""
    with_calls = jobs.run(CALLS, workers=2, options=REPLICAS_OF_TWO)
    without = jobs.run(CALLS, "--no-calls", workers=2, options=REPLICAS_OF_TWO)

    last = [line_with(each, "results").split("'loss': ")[1].split(",")[0].rstrip("}") for each in (with_calls, without)]
    assert last[0] == last[1]


SENTENCES = {
    "not sharded": "model.0.weight is not sharded, and the samples of a microbatch are divided",
    "root left out": "model.1.weight is not sharded",
    "other tensors": "model.scale is a DTensor that fully_shard does not know",
    "optimizer first": "make the optimizer after fully_shard",
    "unsynced": "set_requires_gradient_sync(False) in a sharded replica",
    "symmetric": "enable_symm_mem_for_group in a sharded replica",
    "compiler": "torch._inductor.config.bucket_all_gathers_fx = 'all' in a sharded replica",
    "experts": "all_to_all_single with parts of different sizes",
    "replicate": "CRAFT itself keeps the replicas; leave dp_replicate out",
    "process group": "init_process_group(world_size=4): this worker's replica is its world, with rank 0 of 2",
    "sizes": "microbatch 0 of step 0 has 3 samples, which 2 workers of a replica cannot divide evenly",
    "last batch": "microbatch 0 of step 7 has 3 samples, which 2 workers of a replica cannot divide evenly",
    "iterable": "job.steps(IterableDataset) in a sharded replica",
    "attempts": "job.attempts in a job with --workers-per-replica 2 is not built yet: use job.steps",
    "checked names": "job.steps(split=...) names tp, but job.mesh has the dimensions shard",
}


def test_what_a_sharded_replica_cannot_do_is_refused_by_name(jobs: Jobs) -> None:
    """P1: each of these would give other numbers on workers of one replica, or wait for ever."""
    result = jobs.run(REFUSALS, workers=2, options=REPLICAS_OF_TWO)

    assert result.exit_code == 0, describe(result)
    for name, sentence in SENTENCES.items():
        assert sentence in line_with(result, f"] {name}: "), name


def test_all_workers_of_a_replica_compute_the_same_microbatches_for_comparison(jobs: Jobs) -> None:
    """P1: one in the first step on replicas that do not own it, and one more in a later step on all."""
    result = jobs.run(AUDITED, "none", options=REPLICAS_OF_TWO)

    assert result.exit_code == 0, describe(result)
    logs = {worker: (result.run_dir / "workers" / worker / "log").read_text() for worker in ("w0", "w1", "w2", "w3")}
    computed = {worker: int(log.split(f"computed {worker} ")[1].split()[0]) for worker, log in logs.items()}
    assert computed == {"w0": 12 * 2 + 1, "w1": 12 * 2 + 1, "w2": 12 * 2 + 2, "w3": 12 * 2 + 2}


def test_a_worker_that_computes_other_bits_is_noticed_in_the_first_step(jobs: Jobs) -> None:
    """P1: its wrong numbers reach the other worker of its replica, so that the replicas are named."""
    result = jobs.run(AUDITED, "start", options=REPLICAS_OF_TWO)

    assert result.exit_code == 1, describe(result)
    assert "microbatch 0 of step 0 gave different bits on w0, w1 | w2, w3" in result.output, describe(result)


def test_a_replacement_that_computes_other_bits_leaves_before_its_numbers_count_P1(jobs: Jobs) -> None:
    clean = jobs.run(AUDITED, "none", "--steps", "60", workers=2, options=REPLICAS_OF_TWO)
    fault = Fault(point="batch", step=3, rank=3)
    environment = {"CRAFT_MAX_RESTARTS": "1"}
    job = jobs.start(
        AUDITED, "joined", "--steps", "60", "--slow", "0.03",
        options=REPLICAS_OF_TWO, faults=[fault], environment=environment,
    )  # fmt: skip
    result = job.wait()

    assert result.exit_code == 0, describe(result)
    assert "after it joined, w4 has other bits in microbatch 0" in "".join(map(str, result.run.journal)), describe(
        result
    )
    assert check(result.run_dir, clean.run_dir).violations == (), describe(result)
