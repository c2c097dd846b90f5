"""Jobs of several hosts that heal: hosts that come back, links that carry nothing, a host that leaves in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .hosts import LIGHTHOUSE, Hosts
from .jobs import References, wait_for

STEPS = 200
LENGTH = ("--steps", str(STEPS))
REPLACE = {"CRAFT_MAX_RESTARTS": "50"}

MakeHosts = Callable[..., Hosts]


@pytest.fixture(scope="session")
def reference(references: References) -> str:
    return references.digest(*LENGTH, workers=2)


def begin(hosts: Hosts, **more: Any) -> Path:
    """Start the job everywhere; it is slow until the file that is returned is there."""
    go = hosts.run_dir.with_name("go")
    hosts.start_all(*LENGTH, "--slow-until", str(go), **more)
    hosts.reach_step(20)
    return go


def assert_ended_well(hosts: Hosts, *names: str) -> None:
    for name, result in hosts.wait(*names).items():
        assert result.exit_code == 0, f"host {name}{hosts.tell()}"


def assert_one_history(hosts: Hosts, reference: str) -> None:
    report = hosts.check(reference)
    assert report.violations == (), "\n".join(report.violations) + hosts.tell()
    assert report.steps == STEPS


def lost_hosts(hosts: Hosts) -> set[str]:
    places = {line["member"]["worker_id"]: line["member"]["host"] for line in hosts.events("WorkerJoined")}
    return {places[worker] for worker in hosts.lost()}


@pytest.mark.parametrize(
    "how", ["cut_off", pytest.param("mute", marks=pytest.mark.long), pytest.param("cut", marks=pytest.mark.long)]
)
def test_workers_that_stay_out_of_reach_of_the_lighthouse_end_by_themselves(
    make_hosts: MakeHosts, reference: str, how: str
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
    assert_one_history(hosts, reference)
    wait_for(lambda: not hosts.living("b"), "its workers end", 30)


@pytest.mark.long
def test_a_host_that_was_cut_off_and_comes_back_gets_new_workers_that_join_P1_P3(
    make_hosts: MakeHosts, reference: str
) -> None:
    hosts = make_hosts("a", "b", "c")
    go = begin(hosts, environment=REPLACE)
    hosts.network.cut_off("c")
    wait_for(lambda: hosts.events("HostLost"), "it is lost")
    hosts.network.heal()
    wait_for(lambda: len(hosts.commits("c")) == 2 and all(hosts.commits("c").values()), "a new worker commits", 60)
    go.touch()
    assert_ended_well(hosts)
    assert_one_history(hosts, reference)
    assert lost_hosts(hosts) == {"c"}
    new = hosts.events("WorkerJoined")[-1]["member"]
    assert new["host"] == "c"
    assert hosts.commits("c")[new["worker_id"]][-1].step == STEPS - 1


def test_a_host_whose_agent_died_and_is_started_again_by_hand_takes_part_again_P1_P3(
    make_hosts: MakeHosts, reference: str
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
    assert_one_history(hosts, reference)
    joined = [line["member"]["worker_id"] for line in hosts.events("WorkerJoined")]
    assert len(set(joined)) == len(joined), "ids are never used again"


@pytest.mark.parametrize("pair", ["ab", pytest.param("bc", marks=pytest.mark.long)])
def test_a_link_that_is_cut_between_two_workers_costs_no_more_than_one_of_them_P1_P3(
    make_hosts: MakeHosts, reference: str, pair: str
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
    assert_one_history(hosts, reference)
    assert lost_hosts(hosts) == {lost}


def test_the_summary_of_a_host_counts_the_faults_of_the_job(make_hosts: MakeHosts) -> None:
    hosts = make_hosts("a", "b")
    begin(hosts).touch()
    hosts.kill("b")
    assert "1 fault" in hosts.wait("a")["a"].output


def test_a_host_that_gets_sigterm_leaves_in_order_with_nothing_lost_P1_P2(
    make_hosts: MakeHosts, reference: str
) -> None:
    hosts = make_hosts("a", "b", workers=2)
    go = begin(hosts)
    hosts.jobs["b"].process.terminate()
    (left,) = hosts.wait("b").values()
    assert left.exit_code == 75, hosts.tell()
    assert "preempted by SIGTERM" in left.output
    go.touch()
    assert_ended_well(hosts, "a")
    assert_one_history(hosts, reference)
    assert hosts.events("StepRetried") == []
    assert hosts.lost() == set()
    assert len(hosts.events("WorkerLeft")) == 2
