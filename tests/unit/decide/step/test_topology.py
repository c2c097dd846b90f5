"""Who shares a host with whom, and what follows for the way of the blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from craft.decide.step.plan import plan
from craft.decide.step.topology import between_by_host, between_flat, host_first, seated, spread_of

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(hosts=HOSTS)
def test_on_every_host_each_slice_has_one_collector_and_nobody_is_without_while_another_has_two(
    hosts: list[str],
) -> None:
    spread = spread_of(hosts)
    for host, ranks in enumerate(spread.ranks):
        collectors = [spread.collector(piece, host) for piece in range(spread.num_slices)]
        assert {hosts[rank] for rank in collectors} == {hosts[ranks[0]]}
        counts = [collectors.count(rank) for rank in ranks]
        assert max(counts) - min(counts) <= 1


@given(hosts=HOSTS, owners=st.lists(st.integers(-1, 11), min_size=1, max_size=16))
def test_blocks_go_within_hosts_first_only_where_that_saves_bytes_between_them(
    hosts: list[str], owners: list[int]
) -> None:
    owners = [owner if owner < len(hosts) else -1 for owner in owners]
    spread = host_first(hosts, owners)
    if spread is not None:
        assert sum(hosts.count(host) > 1 for host in set(hosts)) >= 2
        assert between_by_host(spread, owners) < between_flat(spread, owners)


def test_one_host_and_hosts_of_one_worker_go_straight() -> None:
    for hosts in ("", "a", "aaaa", "abcd", "aaab"):
        assert host_first(hosts, plan(8, max(1, len(hosts)))) is None
    assert host_first("aabb", plan(8, 4)) == spread_of("aabb")
    assert host_first("aabbc", plan(8, 5)) == spread_of("aabbc")


def test_hosts_of_eight_send_an_eighth_of_the_bytes() -> None:
    hosts, owners = [name for name in "abcd" for _ in range(8)], plan(64, 32)
    spread = spread_of(hosts)
    assert [len(spread.nodes(host, owners)) for host in range(4)] == [1, 1, 1, 1]
    assert between_flat(spread, owners) == 48
    assert between_by_host(spread, owners) == 6


def test_whoever_joins_sits_beside_its_host() -> None:
    host_of = {"w0": "a", "w1": "a", "v0": "b", "v1": "b", "w2": "a", "u0": "c", "v2": "b"}.__getitem__
    assert seated(("w0", "v0", "v1"), ("w2",), host_of) == ("w0", "w2", "v0", "v1")
    assert seated(("w0", "v0"), ("u0", "v2", "w2"), host_of) == ("w0", "w2", "v0", "v2", "u0")
    assert seated(("w0", "v0"), (), host_of) == ("w0", "v0")


@given(hosts=HOSTS, data=st.data())
def test_nobody_who_stays_is_passed_by_another_who_stays_and_nobody_is_left_out(
    hosts: list[str], data: st.DataObject
) -> None:
    host_of = {f"w{number}": host for number, host in enumerate(hosts)}
    stays = data.draw(st.integers(0, len(hosts)))
    everybody = list(host_of)
    order = seated(everybody[:stays], everybody[stays:], host_of.__getitem__)
    assert sorted(order) == sorted(everybody)
    assert [each for each in order if each in everybody[:stays]] == everybody[:stays]
    if stays:
        assert order[0] == everybody[0], "the leader stays the leader"
