"""Jobs of several hosts that heal: hosts that come back, links that carry nothing, a host that leaves in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .hosts import LENGTH, LIGHTHOUSE, REPLACE, STEPS, Hosts, MakeHosts, assert_ended_well
from .jobs import wait_for


def begin(hosts: Hosts, **more: Any) -> Path:
    """Start the job everywhere; it is slow until the file that is returned is there."""
    go = hosts.run_dir.with_name("go")
    hosts.start_all(*LENGTH, "--slow-until", str(go), **more)
    hosts.reach_step(20)
    return go


def assert_one_history(hosts: Hosts, reference_of_hosts: str) -> None:
    report = hosts.check(reference_of_hosts)
    assert report.violations == (), "\n".join(report.violations) + hosts.tell()
    assert report.steps == STEPS


def lost_hosts(hosts: Hosts) -> set[str]:
    places = {line["member"]["worker_id"]: line["member"]["host"] for line in hosts.events("WorkerJoined")}
    return {places[worker] for worker in hosts.lost()}


@pytest.mark.parametrize(
    "how", ["cut_off", pytest.param("mute", marks=pytest.mark.long), pytest.param("cut", marks=pytest.mark.long)]
)
def test_workers_that_stay_out_of_reach_of_the_lighthouse_end_by_themselves(
    make_hosts: MakeHosts, reference_of_hosts: str, how: str
) -> None:
    """The job may go on without them elsewhere, and they could not know."""
    hosts = make_hosts("a", "b")
    go = begin(hosts)
    if how == "cut":
        hosts.network.cut(LIGHTHOUSE, "b")
    else:
        getattr(hosts.network, how)("b")
    go.touch()
    assert_ended_well(hosts, "a")
    assert_one_history(hosts, reference_of_hosts)
    wait_for(lambda: not hosts.living("b"), "its workers end", 30)


def test_a_host_whose_agent_died_and_is_started_again_by_hand_takes_part_again_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    """As SLURM or Kubernetes would do it: the same command, host name and address, in a new run directory."""
    hosts = make_hosts("a", "b", "c")
    go = begin(hosts, environment=REPLACE)
    hosts.kill("c")
    wait_for(lambda: not hosts.jobs["c"].processes(), "its workers end with it", 5)
    hosts.start("c", *LENGTH, environment=REPLACE)
    wait_for(lambda: any(hosts.commits("c").values()), "a new worker commits", 60)
    go.touch()
    assert_ended_well(hosts)
    assert_one_history(hosts, reference_of_hosts)
    joined = [line["member"]["worker_id"] for line in hosts.events("WorkerJoined")]
    assert len(set(joined)) == len(joined), "ids are never used again"


@pytest.mark.parametrize("pair", ["ab", pytest.param("bc", marks=pytest.mark.long)])
def test_a_link_that_is_cut_between_two_workers_costs_no_more_than_one_of_them_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str, pair: str
) -> None:
    """Both still reach the lighthouse and the third one, so only the silence in their exchange shows it."""
    hosts = make_hosts("a", "b", "c")
    go = begin(hosts)
    hosts.network.cut(*pair)
    try:
        wait_for(lambda: hosts.lost(), "somebody is blamed", 45)
    except AssertionError as error:
        raise AssertionError(f"{error}{hosts.tell()}") from None
    (lost,) = lost_hosts(hosts)
    assert lost in pair
    go.touch()
    assert_ended_well(hosts, *({"a", "b", "c"} - {lost}))
    assert_one_history(hosts, reference_of_hosts)
    assert lost_hosts(hosts) == {lost}


def test_the_summary_of_a_host_counts_the_faults_of_the_job(make_hosts: MakeHosts) -> None:
    hosts = make_hosts("a", "b")
    begin(hosts).touch()
    hosts.kill("b")
    assert "1 fault" in hosts.wait("a")["a"].output


def test_a_host_that_gets_sigterm_leaves_in_order_with_nothing_lost_P1_P2(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b", workers=2)
    go = begin(hosts)
    hosts.jobs["b"].process.terminate()
    (left,) = hosts.wait("b").values()
    assert left.exit_code == 75, hosts.tell()
    assert "preempted by SIGTERM" in left.output
    go.touch()
    assert_ended_well(hosts, "a")
    assert_one_history(hosts, reference_of_hosts)
    assert hosts.events("StepRetried") == []
    assert hosts.lost() == set()
    assert len(hosts.events("WorkerLeft")) == 2
