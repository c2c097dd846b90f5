"""Every two built-in techniques together in one job, under the faults that they answer; all others that can be are off.

``make pairs`` runs all of them and makes the table in docs/reference/technique_pairs.md. ``make test`` runs one.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from craft.decide.techniques import BUILT_IN
from craft.telemetry.records.journal import read_lines

from .jobs import TRAIN, Job, Jobs, References, describe
from .pairs import PARTS, Part, Play

STEPS = 120
WORKERS = 4
PAIRS = list(itertools.combinations(PARTS, 2))
QUICK = {("stragglers", "restore")}
RESULTS = os.environ.get("PAIRS_RESULTS")
"""A folder in which each pair leaves what came out."""


def test_every_built_in_technique_has_its_part() -> None:
    """Membership is what all of them stand on: it takes part in every one of these. A GPU is not to be had here."""
    assert {kind.name for kind in BUILT_IN} == {*PARTS, "membership", "gpu_health"}


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=() if pair in QUICK else pytest.mark.long, id="-".join(pair)) for pair in PAIRS],
)
def test_two_techniques_work_together_P1_P2_P3_P8(
    jobs: Jobs, references: References, tmp_path: Path, pair: tuple[str, str]
) -> None:
    parts = sorted((PARTS[name] for name in pair), key=lambda part: part.last)
    hurry = tmp_path / "hurry"
    store = tmp_path / "store"
    told = [argument for part in parts for argument in part.arguments]
    arguments = ["--steps", str(STEPS), *told]
    options = [option.replace("store", str(store)) for part in parts for option in part.options] + _off(pair, parts)
    environment = {"CRAFT_MAX_RESTARTS": "50" if "restart" in pair or _needs(parts, "restart") else "0"}

    def start(*more: str) -> Job:
        return jobs.start(
            TRAIN,
            *arguments,
            "--slow-until",
            str(hurry),
            workers=WORKERS,
            options=[*options, *more],
            environment=environment,
        )

    job = start()
    job.reach_step(5)
    play = Play(job, tmp_path)
    for part in parts:
        part.show(play)
    hurry.touch()
    result = job.wait()
    reference = references.digest(*arguments, workers=WORKERS) if not told else _undisturbed(jobs, arguments, parts)
    if parts[-1].last:
        assert result.exit_code == 75, describe(result)
        result = start(*(["--resume"] if store.exists() else [])).wait()
        assert result.exit_code == 0 and result.digest == reference, describe(result)
    else:
        told_of = [line for line in result.run.journal if line.get("outcome") == "Fault"]
        lost = {worker for line in told_of for worker in line["worker_ids"]}
        assert play.lost <= lost if play.began_again else play.lost == lost, describe(result)
        result.assert_exact(reference, faults=len(lost), steps=STEPS)
    if RESULTS:
        faults = sum(1 for line in read_lines(job.run_dir / "journal.jsonl") if line.get("outcome") == "Fault")
        (Path(RESULTS) / f"{'-'.join(pair)}.json").write_text(json.dumps({"pair": pair, "faults": faults}))


def _undisturbed(jobs: Jobs, arguments: list[str], parts: list[Part]) -> str:
    """The state at the end of the same job without a fault, where an option has a say in it."""
    options = [option for part in parts if part.arguments for option in part.options]
    result = jobs.run(TRAIN, *arguments, workers=2, options=options)
    assert result.exit_code == 0, describe(result)
    return result.digest


def _needs(parts: list[Part], name: str) -> bool:
    return any(name in part.needs for part in parts)


def _off(pair: tuple[str, str], parts: list[Part]) -> list[str]:
    kept = {*pair, *(name for part in parts for name in part.needs)}
    # Restart is given as a number, as a test's environment has it anyway.
    return [
        flag
        for kind in BUILT_IN
        if kind.optional and kind.name not in kept and kind.name != "restart"
        for flag in ("--disable", kind.name)
    ]
