"""Hosts that hold parts of replicas get positions that make whole ones together."""

from __future__ import annotations

from craft.decide.job.observe import observe
from craft.decide.job.positions import registered
from craft.decide.job.state import JobState
from craft.protocol.events import HostLost, WorkerJoined
from craft.protocol.membership import Member, Slot
from craft.protocol.messages import HostPart, HostReport


def report(host: str, workers: int, first: int | None = None) -> HostReport:
    return HostReport(host=host, pid=1, sequence=1, part=HostPart(workers=workers, first_position=first))


def firsts(size: int, *reports: HostReport, state: JobState | None = None) -> dict[str, int | None]:
    state = state or JobState(slots=size * 2, replica_size=size)
    for each in reports:
        state = registered(state, each)
    return {host: part.first_position for host, part in state.parts}


def with_worker(state: JobState, host: str, place: int, position: int) -> JobState:
    member = Member(worker_id=f"{host}-w{place}", host=host, local_rank=place, slot=Slot(-1, position))
    return observe(state, WorkerJoined(member=member))


def test_hosts_of_one_worker_take_turns() -> None:
    assert firsts(2, *(report(f"h{number}", 1) for number in range(4))) == {"h0": 0, "h1": 1, "h2": 0, "h3": 1}


def test_two_hosts_share_a_replica() -> None:
    assert firsts(4, report("a", 2), report("b", 2)) == {"a": 0, "b": 2}


def test_hosts_of_different_size_complete_each_other() -> None:
    assert firsts(4, report("a", 3), report("b", 1)) == {"a": 0, "b": 3}
    assert firsts(2, report("a", 3), report("b", 3)) == {"a": 0, "b": 1}


def test_a_host_keeps_its_positions_however_often_it_reports() -> None:
    assert firsts(2, report("a", 1), report("b", 1), report("a", 1), report("b", 1)) == {"a": 0, "b": 1}


def test_a_restarted_lighthouse_hears_the_positions_from_the_hosts() -> None:
    assert firsts(2, report("b", 1, first=1), report("a", 1)) == {"a": 0, "b": 1}


def test_a_restarted_lighthouse_and_agent_find_the_positions_of_earlier_workers() -> None:
    state = with_worker(JobState(slots=4, replica_size=4), "b", 1, 3)

    assert firsts(4, report("b", 2), state=state) == {"b": 2}


def test_a_host_takes_the_positions_of_one_that_is_lost() -> None:
    state = JobState(slots=4, replica_size=2)
    for host, position in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        state = with_worker(registered(state, report(host, 1)), host, 0, position)
    state = observe(state, HostLost(host="d", reason="silent"))

    assert firsts(2, report("e", 1), state=state)["e"] == 1


def test_nothing_is_given_out_where_a_replica_is_one_worker() -> None:
    state = JobState(slots=2)

    assert registered(state, report("a", 1)) is state
