"""Jobs of several hosts, each a network namespace of its own: hosts that die, networks that fail, a lighthouse that is killed.

Whatever happens, the job ends with the bits of a job of one host (P1), and what any host committed, lost ones included, is
part of one history (P2, P3).
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from .hosts import HEARTBEAT_LIMIT_S, LENGTH, LIGHTHOUSE, REPLACE, STEPS, Hosts, MakeHosts, assert_ended_well
from .jobs import References, wait_for


def begin(hosts: Hosts, *arguments: str, **more: Any) -> None:
    """Start the job everywhere and wait until it is well under way."""
    hosts.start_all(*LENGTH, *arguments, **more)
    hosts.reach_step(20)


def begin_slowly(hosts: Hosts) -> Path:
    """The same, with replacement of lost workers; the job is slow until somebody makes the file that is returned."""
    go = hosts.run_dir.with_name("go")
    begin(hosts, "--slow-until", str(go), environment=REPLACE)
    return go


def last_for(seconds: float) -> None:
    """Let a fault last."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until, "time passes", seconds + 10)


def generations(hosts: Hosts, name: str) -> set[int]:
    """Those under which workers of a host committed anything."""
    return {commit.generation for own in hosts.commits(name).values() for commit in own}


@pytest.mark.parametrize(("names", "workers"), [("ab", 2), pytest.param("abc", 1, marks=pytest.mark.long)])
def test_a_job_of_several_hosts_has_the_bits_of_one_host_P1(
    make_hosts: MakeHosts, reference_of_hosts: str, names: str, workers: int
) -> None:
    hosts = make_hosts(*names, workers=workers)
    hosts.start_all(*LENGTH)
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())
    assert len(hosts.members()) == len(names) * workers


def test_a_worker_that_dies_where_blocks_travel_within_hosts_first_leaves_no_trace_P1(
    make_hosts: MakeHosts, references: References
) -> None:
    """It is replaced there: before and after, two hosts have two workers each; in between one of them is alone."""
    wide = ("--steps", "120", "--width", "400")
    gradient_bytes = 4 * (400 * 400 + (16 + 1 + 2 + 1 + 2) * 400 + 2)
    hosts = make_hosts("a", "b", workers=2)
    go = hosts.run_dir.with_name("go")
    # No host is silent here, and a busy machine must not make one so.
    hosts.light(limit_s=30)
    for name in hosts.names:
        hosts.start(name, *wide, "--slow-until", str(go), environment=REPLACE)
    # Straight to their owners, twice as many bytes as there are gradients would come to each host.
    assert bytes_per_step(hosts, "b") < 1.5 * gradient_bytes
    os.kill(hosts.living("a")["a-w1"], signal.SIGKILL)
    hosts.wait_for_committing("a", 3)
    assert hosts.members() == ["a-w0", "a-w2", "b-w0", "b-w1"], "who joins sits beside its host"
    assert bytes_per_step(hosts, "b") < 1.5 * gradient_bytes
    go.touch()
    assert_ended_well(hosts)
    hosts.assert_exact(references.digest(*wide, workers=2), steps=120, lost={"a"}, faults=1)


def bytes_per_step(hosts: Hosts, name: str) -> float:
    """What comes to a host from others while some steps are committed."""
    hosts.reach_step(hosts.steps() + 5)
    first, before = hosts.steps(), hosts.network.received_bytes(name)
    hosts.reach_step(first + 12)
    return (hosts.network.received_bytes(name) - before) / (hosts.steps() - first)


@pytest.mark.parametrize("victim", ["a", pytest.param("c", marks=pytest.mark.long)])
def test_a_host_whose_agent_dies_is_lost_with_all_its_workers_P1_P5(
    make_hosts: MakeHosts, reference_of_hosts: str, victim: str
) -> None:
    """Once it is the host of the leader, once another."""
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    hosts.kill(victim)
    # The kernel ends its workers with it, at once: nothing has to be noticed first.
    wait_for(lambda: not hosts.jobs[victim].processes(), "its workers end with it", 5)
    others = sorted({"a", "b", "c"} - {victim})
    assert_ended_well(hosts, *others)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={victim})
    (lost,) = hosts.events("HostLost")
    assert "closed and did not come back" in lost["reason"]


@pytest.mark.parametrize("victim", ["a", pytest.param("c", marks=pytest.mark.long)])
def test_a_host_that_is_cut_off_for_good_is_lost_and_forms_no_generation_of_its_own_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str, victim: str
) -> None:
    """Both of its workers live on and reach each other: that must not be enough for them."""
    hosts = make_hosts("a", "b", "c", workers=2) if victim == "c" else make_hosts("a", "b", workers=2)
    begin(hosts)
    hosts.network.cut_off(victim)
    cut = hosts.steps()
    assert_ended_well(hosts, *(name for name in hosts.names if name != victim))
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={victim})
    assert generations(hosts, victim) == {1}
    for worker, own in hosts.commits(victim).items():
        # It may have had the result of the step in flight in hand, and of the one that the others were in by then.
        assert own[-1].step <= cut + 1, worker
    (lost,) = hosts.events("HostLost")
    assert "no sign of life" in lost["reason"]


@pytest.mark.long
def test_what_can_only_be_seen_by_silence_costs_the_limit_and_little_more_P5(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    hosts.network.cut_off("b")
    began = time.monotonic()
    before = hosts.steps()
    hosts.reach_step(before + 5, "a")
    assert time.monotonic() - began < HEARTBEAT_LIMIT_S + 5
    assert_ended_well(hosts, "a", "c")
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={"b"})


@pytest.mark.long
def test_two_hosts_without_the_lighthouse_do_not_go_on_though_they_are_more_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    """One host and the lighthouse on one side, two hosts that reach each other on the other."""
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    for one in (LIGHTHOUSE, "a"):
        for other in ("b", "c"):
            hosts.network.cut(one, other)
    assert_ended_well(hosts, "a")
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={"b", "c"})
    assert generations(hosts, "b") == generations(hosts, "c") == {1}


def test_a_host_that_cannot_reach_the_lighthouse_is_lost_though_it_reaches_the_others_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b", "c")
    begin(hosts, environment={"CRAFT_LEASE_S": "2"})
    hosts.network.cut(LIGHTHOUSE, "b")
    assert_ended_well(hosts, "a", "c")
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={"b"})
    assert generations(hosts, "b") == {1}
    # The others closed their connections to it, so it knows that it has neither an exchange nor a lighthouse.
    wait_for(lambda: not hosts.living("b"), "its workers end by themselves", 20)


@pytest.mark.long
def test_a_host_that_hears_and_is_not_heard_is_lost_and_ends_its_workers_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    hosts.network.mute("b")
    assert_ended_well(hosts, "a", "c")
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={"b"})
    wait_for(lambda: not hosts.living("b"), "its workers are ended", 20)
    assert generations(hosts, "b") == {1}


@pytest.mark.long
def test_a_host_that_is_lost_and_comes_back_when_the_job_is_over_hears_of_that(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b")
    begin(hosts)
    hosts.network.cut_off("b")
    assert_ended_well(hosts, "a")
    hosts.network.heal()
    hosts.wait("b", limit_s=30)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={"b"})


# Replacement.


@pytest.mark.parametrize("victim", ["a", pytest.param("c", marks=pytest.mark.long)])
def test_a_host_that_was_cut_off_and_comes_back_gets_new_workers_that_join_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str, victim: str
) -> None:
    """Once it is the host of the leader, once another."""
    hosts = make_hosts("a", "b", "c")
    go = begin_slowly(hosts)
    hosts.network.cut_off(victim)
    wait_for(lambda: hosts.events("HostLost"), "it is lost")
    hosts.network.heal()
    hosts.wait_for_committing(victim, 2)
    go.touch()
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={victim})
    assert hosts.commits(victim)[f"{victim}-w1"][-1].step == STEPS - 1


# Networks that are bad for a while, or not bad enough.


@pytest.mark.parametrize("how", ["host", pytest.param("link", marks=pytest.mark.long)])
def test_a_cut_that_heals_within_the_limit_costs_nobody_P1(
    make_hosts: MakeHosts, reference_of_hosts: str, how: str
) -> None:
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    if how == "host":
        hosts.network.cut_off("b")
    else:
        hosts.network.cut("a", "b")
    last_for(HEARTBEAT_LIMIT_S / 3)
    hosts.network.heal()
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())
    assert generations(hosts, "a") == {1}


def test_a_slow_host_slows_the_job_and_is_not_taken_for_lost_P1(make_hosts: MakeHosts, reference_of_hosts: str) -> None:
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    hosts.network.slow("b", megabits=10)
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())


def test_a_host_that_loses_packets_slows_the_job_and_is_not_taken_for_lost_P1(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    hosts.network.lose("b", percent=2)
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())


# The lighthouse.


def test_a_lighthouse_that_nobody_reaches_for_longer_than_the_limit_delays_no_step_and_costs_nobody_P4(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b")
    begin(hosts)
    # So that the job lasts longer than the fault.
    hosts.network.slow("a", megabits=5)
    began = time.time()
    hosts.network.cut_off(LIGHTHOUSE)
    last_for(2 * HEARTBEAT_LIMIT_S)
    ended, steps = time.time(), hosts.steps()
    hosts.network.heal()
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())
    assert steps < STEPS, "the job was over before the fault was"
    times = sorted(commit.time for own in hosts.commits("a").values() for commit in own)
    meanwhile = [moment for moment in times if began < moment < ended]
    assert max(after - before for before, after in itertools.pairwise(meanwhile)) < HEARTBEAT_LIMIT_S


def test_a_lighthouse_that_is_killed_and_started_again_by_hand_takes_the_job_over_P1_P4(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b")
    begin(hosts)
    hosts.kill_lighthouse()
    # Training goes on without it.
    hosts.reach_step(hosts.steps() + 30)
    hosts.light()
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())
    assert [line["restarted"] for line in hosts.events("LighthouseStarted")] == [False, True]
    assert generations(hosts, "a") == generations(hosts, "b") == {1}


@pytest.mark.long
def test_a_host_that_dies_while_there_is_no_lighthouse_is_lost_for_the_next_one_P1_P3(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b", "c")
    begin(hosts)
    hosts.kill_lighthouse()
    hosts.kill("a")
    hosts.light()
    assert_ended_well(hosts, "b", "c")
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost={"a"})


def test_a_second_lighthouse_of_a_job_is_refused(make_hosts: MakeHosts, reference_of_hosts: str) -> None:
    hosts = make_hosts("a", "b")
    begin(hosts)
    assert "has a living lighthouse already" in hosts.refuse_lighthouse()
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())


def test_a_second_agent_of_the_same_host_is_refused_and_disturbs_nobody(
    make_hosts: MakeHosts, reference_of_hosts: str
) -> None:
    hosts = make_hosts("a", "b")
    go = hosts.run_dir.with_name("go")
    hosts.start_all(*LENGTH, "--slow-until", str(go))
    hosts.reach_step(5)
    second = hosts.start("b", *LENGTH, host="a")
    result = second.wait()
    assert result.exit_code == 2, result
    assert "host a has an agent already" in result.output + result.errors
    go.touch()
    assert_ended_well(hosts)
    hosts.assert_exact(reference_of_hosts, steps=STEPS, lost=set())


def test_an_agent_that_comes_when_the_job_is_over_ends_at_once(make_hosts: MakeHosts) -> None:
    hosts = make_hosts("a", "b")
    begin(hosts)
    assert_ended_well(hosts)
    late = hosts.start("b", *LENGTH, host="late").wait(30)
    assert late.exit_code == 0, late
