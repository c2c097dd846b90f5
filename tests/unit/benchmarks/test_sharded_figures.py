"""The benchmarks of sharded jobs: what they read out of commit lines, and what their reports say of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.commits import Commit, read_commits
from bench.completion import account, moments
from bench.completion_chart import draw_completion
from bench.completion_report import summarize_completion
from bench.sharded_jobs import Length
from bench.sharded_models import Blocks, Taught, final_loss, shard_bytes
from bench.sharded_recovery import full_again
from bench.sharded_report import more_shards, summarize_sharded_overhead, summarize_sharded_recovery
from bench.verdict import Summary

LENGTH = Length(samples=8, steps=4)


def commit(step: int, time_s: float, generation: int = 1, world_size: int = 4, owners: int = 2) -> Commit:
    return Commit(step, time_s, generation, world_size, True, owners)


def verdicts(summary: Summary) -> dict[str, bool]:
    return {check.what: check.passed for check in summary.checks}


def test_a_commit_line_says_how_many_replicas_computed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(
        '{"step":1,"time":2.0,"generation":3,"world_size":4,"plan":{"0":"w0","1":"w0","2":"w2","3":"w2"}}\n'
        '{"step":2,"time":3.0,"generation":4,"world_size":3,"plan":{"0":"w2","1":"w2"}}\n'
        '{"step":3,"time":4.0,"generation":4,"world_size":3}\n'
    )

    assert [each.owners for each in read_commits(path)] == [2, 1, 0]


def test_full_strength_needs_a_newer_generation_in_which_all_replicas_compute() -> None:
    before = [commit(0, 1.0), commit(1, 2.1)]
    short = commit(2, 3.0, generation=2, world_size=3, owners=1)
    joined = commit(3, 4.0, generation=3, world_size=4, owners=1)

    assert full_again(2.0, {"w2": [*before, short, joined]}, full=4) is None
    assert full_again(2.0, {"w2": [*before, short, joined, commit(4, 5.0, generation=3)]}, full=4) == 3.0


def test_full_strength_of_lines_without_a_plan_goes_by_the_number_of_groups() -> None:
    lines = [commit(1, 1.0, 1, 2, 0), commit(2, 7.0, 2, 1, 0), commit(3, 9.0, 3, 2, 0)]

    assert full_again(2.0, {"1.0": lines, "1.1": lines}, full=2) == 7.0


def test_steps_since_a_save_count_as_repeated() -> None:
    lines = [commit(step, step) for step in (1, 2, 3)] + [commit(step, 10 + step) for step in (2, 3, 4)]

    found = account("checkpoint-restart", {"0": lines, "1": lines}, LENGTH)

    assert found == {"trained": 4 * 32, "lost": 0, "repeated": 2 * 32}


def test_what_a_missing_group_would_have_had_counts_as_lost() -> None:
    survivor = [commit(1, 1.0, 1, 2), commit(2, 2.0, 2, 1), commit(3, 3.0, 2, 1), commit(4, 4.0, 3, 2)]
    restarted = [survivor[0], survivor[3]]

    found = account("torchft", {"0.0": restarted, "1.0": survivor}, LENGTH)

    assert found == {"trained": 6 * 16, "lost": 2 * 16, "repeated": 0}


def test_a_step_that_is_nowhere_committed_counts_as_lost() -> None:
    found = account("craft", {"w0": [commit(0, 1.0), commit(1, 2.0)], "w1": [commit(2, 3.0)]}, LENGTH)

    assert found == {"trained": 3 * 32, "lost": 32, "repeated": 0}


def test_a_run_lasts_from_the_first_commit_of_any_worker_to_the_last() -> None:
    assert moments({"a": [commit(1, 5.0), commit(2, 6.0)], "b": [commit(1, 4.5)], "c": []}) == (4.5, 6.0)


def test_blocks_give_every_sample_of_an_epoch_to_one_worker_once() -> None:
    dataset = Taught(size=64)
    blocks = Blocks(dataset, samples=4, workers=4)
    features, _ = dataset.rows(range(64))

    parts = [blocks.batch(step, rank)[0] for step in range(4) for rank in range(4)]
    later = torch.cat([blocks.batch(step, rank)[0] for step in range(4, 8) for rank in range(4)])

    assert sorted(map(tuple, torch.cat(parts).tolist())) == sorted(map(tuple, features.tolist()))
    assert not torch.equal(later, torch.cat(parts))
    assert torch.equal(blocks.batch(1, 2)[0], parts[6])


def test_the_final_loss_is_that_of_the_shards_put_together(tmp_path: Path) -> None:
    from bench.models import build_model
    from bench.sharded_models import DEPTH, WIDTH

    model = build_model(seed=3, width=WIDTH, depth=DEPTH)
    halves = {name: each.detach().chunk(2) for name, each in model.named_parameters()}
    for position in range(2):
        torch.save({name: parts[position].clone() for name, parts in halves.items()}, tmp_path / f"shard{position}.pt")
    features, labels = Taught().rows(range(2048))

    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(features), labels)
    assert final_loss(tmp_path) == pytest.approx(float(expected))


def test_a_shard_is_half_of_the_gradient() -> None:
    assert shard_bytes(1024) == 4 * (256 * 1024 + 1024 + 3 * (1024 * 1024 + 1024) + 1024 * 16 + 16) // 2


def memory(width: int, shard: int, craft: float, hsdp: float) -> dict[str, Any]:
    return {"width": width, "shard_bytes": shard, "craft": [craft - 1, craft], "hsdp": [hsdp, hsdp - 1]}


def test_memory_is_compared_by_its_growth_with_the_model() -> None:
    rows = [memory(1, 10, 500.0, 400.0), memory(2, 30, 600.0, 470.0)]

    assert more_shards(rows) == 1.5
    assert math.isnan(more_shards(rows[:1]))


def overhead(ratio: float, shards: float) -> dict[str, Any]:
    blocks = [{"craft": ratio, "hsdp": 1.0, "craft_cpu": 3.0, "hsdp_cpu": 3.0}] * 12
    rows = [memory(1, 10, 100.0, 100.0), memory(2, 20, 200.0 + 10 * shards, 200.0)]
    return {"blocks": blocks, "memory": rows, "settings": {"steps_per_block": 10}}


@pytest.mark.parametrize(("ratio", "shards", "passed"), [(1.04, 0.9, True), (1.06, 1.2, False)])
def test_bars_of_the_failure_free_step(ratio: float, shards: float, passed: bool) -> None:
    assert set(verdicts(summarize_sharded_overhead(overhead(ratio, shards))).values()) == {passed}


def recovery(craft_s: float, exact: bool) -> dict[str, Any]:
    craft = {"recovery_s": craft_s, "full_s": 2.0, "step_s": 0.1, "script_s": 0.8}
    torchft = {"recovery_s": 5.0, "full_s": 12.0, "step_s": 0.1}
    kills = {"craft": [craft] * 20, "torchft": [torchft] * 3, "torchft-tuned": []}
    return {"kills": kills, "exact": [True, exact], "tuned_ms": 500}


def test_bars_of_a_kill_hold_where_all_is_fast_and_exact() -> None:
    assert all(verdicts(summarize_sharded_recovery(recovery(0.19, exact=True))).values())


def test_one_job_with_other_bits_or_a_slow_median_fails() -> None:
    assert not verdicts(summarize_sharded_recovery(recovery(0.19, exact=False)))[
        "jobs of CRAFT with the undisturbed bits"
    ]
    slow = verdicts(summarize_sharded_recovery(recovery(0.6, exact=True)))
    assert [what for what, passed in slow.items() if not passed] == [
        "median of SIGKILL to the other replica's next commit, beyond one step",
        "next commit of torchft over CRAFT's, medians",
    ]


def completion(seconds: float, digest: str, lost: int) -> dict[str, Any]:
    calm = {"system": "craft", "kind": "undisturbed", "seconds": 100.0, "kills": [], "loss": 1.5}
    calm |= {"trained": 320, "lost": 0, "repeated": 0, "digest": "a", "violations": []}
    hit = {**calm, "kind": "disturbed", "seconds": seconds, "kills": [20.0], "digest": digest, "lost": lost}
    other = [{**each, "system": "torchft", "lost": 64} for each in (calm, hit)]
    limits, size = {"save_every": 50, "tuned_ms": 500}, {"samples": 8, "steps": 10}
    return {"runs": [calm, hit, *other], "length": size, "limits": limits, "settings": {"every": 20.0}}


@pytest.mark.parametrize(
    ("seconds", "digest", "lost", "failed"), [(107.0, "a", 0, 0), (109.0, "a", 0, 1), (107.0, "b", 32, 2)]
)
def test_bars_of_time_to_train(seconds: float, digest: str, lost: int, failed: int) -> None:
    summary = summarize_completion(completion(seconds, digest, lost))

    assert list(verdicts(summary).values()).count(False) == failed


def test_the_chart_has_every_system_and_the_fate_of_its_samples(tmp_path: Path) -> None:
    result = completion(107.0, "a", 0)
    draw_completion(result, summarize_completion(result).figures, tmp_path / "completion.svg")

    drawn = (tmp_path / "completion.svg").read_text()
    assert "107 s (+7%), no sample lost or repeated" in drawn
    assert "107 s (+7%), 64 samples lost" in drawn
