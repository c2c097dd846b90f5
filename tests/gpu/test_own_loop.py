"""``job.attempts`` on a GPU that workers share: its reductions go by NCCL, between those who keep pace (P1 to P3)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job, Jobs, References, describe, wait_for
from tests.integration.test_own_loop import GAN
from tests.unit.groups.cast import LIMIT_S, Cast
from tests.unit.groups.test_gloo import opened
from tests.unit.worker.reducing import STEPS, one_more_comes

from craft.groups.nccl import NcclGroup
from craft.testing import Fault

WIDE = ("--width", "2048")
"""So that there are three buckets of the one network, and six of the other."""
JOB_LIMIT_S = 120.0
REPLACED = {"CRAFT_MAX_RESTARTS": "20"}


@pytest.fixture
def cast(stage: None) -> Iterator[Cast]:
    cast = Cast(device="cuda:0")
    yield cast
    cast.end()


def reduced(group: NcclGroup, hosts: str) -> list[tuple[str, int]]:
    """For each step, what is wrong with what came of it, and how often this member gave NCCL something."""
    calls, swap = [0], group.swap

    def counted(sends: Any, receives: Any) -> None:
        calls[0] += 1
        swap(sends, receives)

    group.swap = counted  # type: ignore[method-assign]
    found = []
    for problem in one_more_comes(group, hosts, "cuda"):
        found.append((problem, calls[0]))
        calls[0] = 0
    return found


@pytest.mark.parametrize("hosts", ["aaa", "aabbb"])
def test_reductions_go_by_nccl_between_those_who_keep_pace_and_have_the_bits_of_the_tree_P1(
    cast: Cast, hosts: str
) -> None:
    actors = cast.actors(len(hosts))
    opened(1, list(actors))
    for actor in actors:
        actor.ask("begin", "reduced", "call", 1, reduced, hosts)
    outcomes = [actor.ask("end", "reduced", LIMIT_S) for actor in actors]
    assert [each.error for each in outcomes] == [""] * len(hosts), outcomes
    assert [[problem for problem, _ in each.value] for each in outcomes] == [[""] * STEPS] * len(hosts)
    counts = [[calls > 0 for _, calls in each.value] for each in outcomes]
    assert counts == [[True] * STEPS] * (len(hosts) - 1) + [[False, False, True, True]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("blocks_sent", 2), ("result_sent", 6), id="in the exchange of each network"),
        pytest.param(("before_acknowledge", 1), ("acknowledging", 2), id="at the end of each exchange"),
        pytest.param(("between", 1), ("updated", 1), id="after each update"),
        pytest.param(("before_acknowledge", 3), ("acknowledging", 3), id="in the commit"),
        pytest.param(("discriminator", 1), ("committed", 1), id="before and after everything"),
    ],
)
def test_workers_that_die_anywhere_in_a_body_do_not_change_a_bit_P1_P2_P3(
    jobs: Jobs, references: References, first: tuple[str, int], second: tuple[str, int]
) -> None:
    """First the leader, then another one; the last one goes on alone."""
    faults = [
        Fault(point=point, step=step, rank=rank, occurrence=occurrence)
        for (point, occurrence), step, rank in ((first, 4, 0), (second, 8, 1))
    ]
    result = jobs.run(GAN, *WIDE, workers=3, faults=faults, limit_s=JOB_LIMIT_S)
    assert len(result.struck) == 2, describe(result)
    result.assert_exact(references.digest_of(GAN, *WIDE, workers=1), faults=2, steps=16)


def test_through_the_memory_of_the_host_the_bits_are_the_same_P1(jobs: Jobs, references: References) -> None:
    fault = Fault(point="result_sent", step=5, rank=2, occurrence=5)
    options = ["--group", "gloo"]
    result = jobs.run(GAN, *WIDE, workers=3, options=options, faults=[fault], limit_s=JOB_LIMIT_S)
    assert len(result.struck) == 1, describe(result)
    result.assert_exact(references.digest_of(GAN, *WIDE, workers=1), faults=1, steps=16)


def computing(job: Job) -> set[str]:
    """Workers that have computed some of a step that was committed, dead ones included."""
    assert job.process.poll() is None, "it has ended"
    lines = {file.parent.name: file.read_text().splitlines() for file in job.run_dir.glob("workers/*/steps.jsonl")}
    return {name for name, each in lines.items() if any(json.loads(line)["microbatches"] for line in each[:-1])}


def test_others_in_the_place_of_the_lost_reduce_with_the_rest_and_no_bit_changes_P1_P2_P3(
    jobs: Jobs, references: References, tmp_path: Path
) -> None:
    """One is lost in each network's exchange, the second one after the first was replaced."""
    arguments, gate = (*WIDE, "--steps", "120"), tmp_path / "gate"
    faults = [
        Fault(point="blocks_sent", step=4, rank=1, occurrence=2),
        Fault(point="result_sent", rank=0, occurrence=5, after_file="one_is_replaced"),
    ]
    slow = ("--slow-until", str(gate), "--slow-s", "0.3")
    job = jobs.start(GAN, *arguments, *slow, workers=3, faults=faults, environment=REPLACED)
    wait_for(lambda: len(computing(job)) >= 4, "another one takes part", JOB_LIMIT_S)
    (job.run_dir / "one_is_replaced").touch()
    wait_for(lambda: len(computing(job)) >= 5, "another one takes part again", JOB_LIMIT_S)
    gate.touch()
    whole = references.digest_of(GAN, *arguments, workers=1)
    job.wait(JOB_LIMIT_S).assert_exact(whole, faults=2, steps=120)
