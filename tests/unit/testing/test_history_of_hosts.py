"""The history of a job of several hosts: the files of each, and the journal with the lighthouse."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.protocol.errors import ConfigError
from craft.testing.history import check

from .runs import DROPPING, STEPS, Files, commit, spread, write_lines


@pytest.fixture
def hosts(files: Files) -> list[Path]:
    """The same job on two hosts: w0 on the first, w1 on the second; the journal is with the lighthouse, elsewhere."""
    return spread(files)


def test_an_untouched_run_of_several_hosts_has_no_violation(files: Files, hosts: list[Path]) -> None:
    report = check(files.folder, "d1", hosts)
    assert (report.violations, report.steps, report.digest, report.dropped) == ((), STEPS, "d1", ())


def test_what_a_host_committed_that_was_cut_off_counts(files: Files) -> None:
    """It went on alone, in the old generation."""
    files.steps["w1"].append(commit("w1", 2, 1, {"0": "w0", "1": "w0", "2": "w1", "3": "w1"}))
    violations = check(files.folder, "d1", spread(files)).violations
    assert "P3: step 2: microbatch 2 is by w0 according to w0, and by w1 according to w1" in violations


def test_a_host_that_is_not_named_is_missed(files: Files, hosts: list[Path]) -> None:
    violations = check(files.folder, "d1", hosts[1:]).violations
    assert (
        "P2: w0 finished after 4 steps, of which the last that it wrote down is None, but the job has 2" in violations
    )


def test_leaders_of_several_hosts_may_write_down_the_same_step_with_the_same_values(
    files: Files, hosts: list[Path]
) -> None:
    write_lines(hosts[0] / "metrics.jsonl", files.metrics[:3])
    write_lines(hosts[1] / "metrics.jsonl", [{**line, "time": 9.0} for line in files.metrics[1:]])
    assert check(files.folder, "d1", hosts).violations == ()
    write_lines(hosts[1] / "metrics.jsonl", [{**line, "loss": 2.0} for line in files.metrics[2:]])
    assert check(files.folder, "d1", hosts).violations == (
        f"P3: step 2: metrics.jsonl of {hosts[0]} has {{'step': 2, 'loss': 1.0}}, that of {hosts[1]}"
        " {'step': 2, 'loss': 2.0}",
    )


def test_metrics_of_several_hosts_have_every_step_and_none_twice_in_a_file(files: Files, hosts: list[Path]) -> None:
    write_lines(hosts[0] / "metrics.jsonl", files.metrics[:1])
    write_lines(hosts[1] / "metrics.jsonl", [*files.metrics[2:], files.metrics[3], {"step": 9}])
    assert check(files.folder, "d1", hosts).violations == (
        "P3: step 1 is in metrics.jsonl 0 times",
        "P3: step 9 is in metrics.jsonl, but was not committed",
        f"P3: step 3 is in metrics.jsonl of {hosts[1]} 2 times",
    )


def test_under_shrink_several_hosts_may_drop_what_the_journal_says(files: Files) -> None:
    files.on_loss = "shrink"
    files.steps["w0"][2].update(plan=DROPPING, microbatches=[0, 1, 3])
    files.journal[-2].update(given=[], dropped=[2])
    report = check(files.folder, "d1", spread(files))
    assert (report.violations, report.dropped) == ((), ((2, 2),))


def test_a_directory_that_is_no_hosts_or_is_named_twice_is_refused(files: Files, hosts: list[Path]) -> None:
    with pytest.raises(ConfigError, match="is not the run directory of a host"):
        check(files.folder, "d1", [*hosts, files.folder])
    with pytest.raises(ConfigError, match="name each host once"):
        check(files.folder, "d1", [*hosts, hosts[0]])
