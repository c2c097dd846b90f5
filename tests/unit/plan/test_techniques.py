"""What each technique would cost a job: the rows of a plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craft.plan.techniques import (
    ASYNC_SAVE_SHARE,
    REGROUP_S,
    SPARE_S,
    STALL_SHARE,
    TORCHFT_PAUSE_S,
    TRANSFER_GB_PER_S,
    Cluster,
    Row,
    advise,
    compare,
)
from craft.protocol.errors import ConfigError

from .simulated import Answer, Job

ROUGH = Cluster(
    gpus=64,
    gpus_per_host=4,
    failures_per_day=24,
    outages_per_month=30,
    step_s=20,
    checkpoint_s=60,
    restart_s=600,
    replace_s=1800,
    spares=2,
    state_gb=100,
)
"""A job so unlucky that every share of its losses shows."""


def rows_of(cluster: Cluster) -> dict[str, Row]:
    return {row.name: row for row in compare(cluster)}


def five_of_four(missing: int) -> float:
    """256 microbatches over 16 hosts of 4: each worker has 4 of them, 5 with up to 3 hosts missing, and so on."""
    return 4 / -(-256 // (64 - 4 * missing))


def all_or_nothing(missing: int) -> float:
    return float(missing == 0)


REDO_S = 1.0 + REGROUP_S + 20 * (5 / 4 - 1)
WAIT_S = 1.0 + REGROUP_S + 20
JOIN_S = 1.0 + SPARE_S + 100 / TRANSFER_GB_PER_S
TORCHFT_S = TORCHFT_PAUSE_S + 20
OURS_S, THEIRS_S = STALL_SHARE * 60, ASYNC_SAVE_SHARE * 60


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("redo", Answer(REDO_S, replace_s=1800, speed=five_of_four, stall_s=OURS_S)),
        ("redo-spares", Answer(REDO_S, JOIN_S, 1800, 2, speed=five_of_four, stall_s=OURS_S)),
        ("shrink", Answer(1.0 + REGROUP_S, replace_s=1800, speed=five_of_four, stall_s=OURS_S)),
        ("wait", Answer(WAIT_S, replace_s=1800, speed=all_or_nothing, stall_s=OURS_S)),
        ("wait-spares", Answer(WAIT_S, JOIN_S, 1800, 2, speed=all_or_nothing, stall_s=OURS_S)),
        (
            "torchft",
            Answer(TORCHFT_S, replace_s=1800, speed=lambda missing: (1 - missing / 16) / 1.0005, stall_s=THEIRS_S),
        ),
    ],
)
def test_each_technique_gets_on_as_in_a_job_that_is_played(name: str, answer: Answer) -> None:
    row = rows_of(ROUGH)[name]
    assert row.interval_s is not None
    answer = answer._replace(interval_s=row.interval_s, write_s=60, restart_s=600)
    job = Job(ROUGH.num_units, ROUGH.failure_rate, ROUGH.outage_rate, answer)
    assert row.goodput == pytest.approx(job.play(1_500 / ROUGH.outage_rate).goodput, rel=0.015)


def test_samples_that_are_left_out_are_those_of_the_lost_in_a_step_or_of_a_step_and_of_all_who_are_missing() -> None:
    rows = rows_of(ROUGH)
    one_step = 24 * 20 / 86400
    assert rows["shrink"].left_out == pytest.approx(one_step / 16)
    # On average 24 a day are missing for 1800 s each, less the time right after a loss, in which nobody gets on.
    assert rows["torchft"].left_out == pytest.approx(one_step + 24 * (1800 - TORCHFT_S) / 86400 / 16, rel=1e-6)


def test_a_step_grows_with_the_workers_that_are_missing_not_with_the_hosts() -> None:
    # 256 microbatches: 4 for each of 64 workers, 5 for each of 60, 6 for each of 48.
    assert [ROUGH.slower(missing) for missing in (0, 1, 4)] == [1.0, 1.25, 1.5]


def test_money_is_what_is_paid_less_what_bought_progress_and_spares_are_paid() -> None:
    cluster = Cluster(gpus=16, gpus_per_host=8, price=2.0, weeks=2, spares=1)
    rows = rows_of(cluster)
    hours = 2 * 7 * 24
    assert rows["redo"].paid == pytest.approx(2.0 * 16 * hours)
    assert rows["redo-spares"].paid == pytest.approx(2.0 * 24 * hours)
    for row in rows.values():
        assert row.lost == pytest.approx(row.paid - 2.0 * 16 * hours * row.goodput)
        assert row.saves == pytest.approx(rows["restart-best"].lost - row.lost)


def test_what_is_done_today_comes_first_and_is_what_others_are_compared_with() -> None:
    rows = compare(Cluster(every_s=4 * 3600.0))
    assert [row.name for row in rows[:2]] == ["restart", "restart-best"]
    assert rows[0].saves == 0 and rows[0].interval_s == 4 * 3600.0
    assert rows[1].saves > 0


def test_only_techniques_that_leave_no_sample_out_are_advised() -> None:
    rows = compare(Cluster())
    left_out = {row.name for row in rows if not row.exact}
    assert left_out == {"torchft", "shrink"} and all(row.left_out > 0 for row in rows if not row.exact)
    assert advise(rows).name in ("redo", "redo-spares")


def test_a_job_of_one_host_needs_its_checkpoints_for_every_failure() -> None:
    rows = rows_of(Cluster(gpus=8, failures_per_day=3, spares=0))
    assert rows["redo"].goodput == pytest.approx(rows["restart-craft"].goodput)


def test_without_failures_nothing_is_lost_and_no_checkpoint_is_needed() -> None:
    for row in compare(Cluster(failures_per_day=0, outages_per_month=0, spares=0)):
        assert row.goodput == pytest.approx(1.0, abs=0.002) and row.interval_s is None


def test_more_microbatches_make_a_missing_host_cheaper() -> None:
    few, many = (rows_of(Cluster(microbatches=number * 1024))["redo"].goodput for number in (1, 16))
    assert few < many


@pytest.mark.parametrize("wrong", [{"gpus": 1001}, {"gpus": 4, "gpus_per_host": 8}, {"gpus": 8, "lost_gpus": 3}])
def test_gpus_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="GPUs are"):
        Cluster(**wrong)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    per_host = draw(st.integers(1, 8))
    seconds = st.floats(0.0, 4 * 3600.0)
    return Cluster(
        gpus=per_host * draw(st.integers(1, 60)),
        gpus_per_host=per_host,
        failures_per_day=draw(st.floats(0, 500)),
        outages_per_month=draw(st.floats(0, 100)),
        step_s=draw(st.floats(0.01, 600)),
        checkpoint_s=draw(seconds),
        restart_s=draw(seconds),
        replace_s=draw(seconds),
        every_s=draw(st.none() | st.floats(0.1, 1e5)),
        spares=draw(st.integers(0, 4)),
    )


@settings(max_examples=50)
@given(clusters(), st.floats(0.1, 500))
def test_every_goodput_is_a_share_and_falls_with_the_rate_of_failures(cluster: Cluster, more: float) -> None:
    assert cluster.failures_per_day is not None
    worse = Cluster(
        **{name: getattr(cluster, name) for name in cluster.__struct_fields__ if name != "failures_per_day"},
        failures_per_day=cluster.failures_per_day + more,
    )
    for row, then in zip(compare(cluster), compare(worse), strict=True):
        assert 0 <= then.goodput <= row.goodput + 1e-9 <= 1 + 2e-9, row.name
        assert 0 <= row.left_out <= 1
