"""Finding and cutting TCP connections among this process's own sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

from craft.groups import sockets

dist: Any = torch.distributed

Connection = tuple[socket.socket, socket.socket, socket.socket]


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A listening socket, and both ends of a connection to it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        for each in (server, client, accepted):
            each.settimeout(10)
        yield server, client, accepted


def names(found: list[socket.socket]) -> set[tuple[object, object]]:
    """Both ends of each connection, as this process sees them; closes the duplicates."""
    ends = set()
    for copy in found:
        with copy:
            ends.add((copy.getsockname(), copy.getpeername()))
    return ends


def ends_of(one: socket.socket) -> tuple[object, object]:
    return one.getsockname(), one.getpeername()


def test_a_listening_socket_is_known_by_its_address_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert address in sockets.listening_addresses()

    assert address not in sockets.listening_addresses()


def test_an_ipv4_address_is_the_same_on_a_socket_that_speaks_both() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as accepted:
            peer = accepted.getpeername()
            assert peer[0] == "::ffff:127.0.0.1"
            found = sockets.connections(-1, {("127.0.0.1", peer[1])})
            assert names(found) == {ends_of(accepted)}


def test_accepted_connections_are_found_by_the_port_that_accepted_them(connection: Connection) -> None:
    server, _, accepted = connection

    assert names(sockets.connections(server.getsockname()[1], set())) == {ends_of(accepted)}


def test_connections_are_found_by_the_address_they_lead_to(connection: Connection) -> None:
    server, client, _ = connection

    assert names(sockets.connections(-1, {server.getsockname()})) == {ends_of(client)}


def test_neither_listening_nor_foreign_sockets_are_found(connection: Connection) -> None:
    assert sockets.connections(-1, {("127.0.0.1", 1)}) == []


def test_a_connection_that_was_cut_is_not_found_though_its_port_is_used_again(connection: Connection) -> None:
    """Gloo holds connections of an aborted group for a while; a newer group may listen where the old one did."""
    server, client, accepted = connection
    port = server.getsockname()[1]
    sockets.cut(sockets.connections(port, set()))
    assert client.recv(1) == b""

    with socket.create_connection(server.getsockname()), server.accept()[0] as newer:
        assert names(sockets.connections(port, set())) == {ends_of(newer)}
    assert accepted.fileno() != -1


def test_a_connection_that_the_peer_ended_is_found(connection: Connection) -> None:
    server, client, accepted = connection
    client.close()
    assert accepted.recv(1) == b""

    assert names(sockets.connections(server.getsockname()[1], set())) == {ends_of(accepted)}


def test_sockets_that_are_not_tcp_are_left_alone() -> None:
    left, right = socket.socketpair()
    with left, right, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        assert udp.getsockname() not in sockets.listening_addresses()
        assert sockets.connections(udp.getsockname()[1], set()) == []


def test_a_cut_ends_both_directions_and_leaves_the_listening_socket(connection: Connection) -> None:
    server, client, accepted = connection

    sockets.cut(sockets.connections(server.getsockname()[1], set()))

    assert client.recv(1) == b""
    assert accepted.recv(1) == b""
    with socket.create_connection(server.getsockname()) as again, server.accept()[0] as accepted_again:
        again.sendall(b"x")
        assert accepted_again.recv(1) == b"x"


def test_what_is_cut_already_may_be_cut_again(connection: Connection) -> None:
    server, _, _ = connection
    port = server.getsockname()[1]
    twice = sockets.connections(port, set()) + sockets.connections(port, set())

    sockets.cut(twice)

    assert all(copy.fileno() == -1 for copy in twice)


def test_a_cut_keeps_no_file_descriptor(connection: Connection) -> None:
    server, _, _ = connection
    found = sockets.connections(server.getsockname()[1], set())

    sockets.cut(found)

    assert {copy.fileno() for copy in found} == {-1}


def test_all_gloo_groups_of_a_process_are_aborted_and_nothing_else_is(connection: Connection) -> None:
    _, client, accepted = connection
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups: dict[int, Any] = {}

    def open_group(rank: int) -> None:
        # Of its own: who waits for a key keeps a client from whoever would set it.
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        groups[rank] = dist.ProcessGroupGloo(dist.PrefixStore("all", client), rank, 2, timedelta(minutes=30))

    openers = [threading.Thread(target=open_group, args=(rank,)) for rank in (0, 1)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(60)
    works = [groups[rank].recv([torch.zeros(1)], 1 - rank, 0) for rank in (0, 1)]
    assert sockets.abort_gloo() >= 2, "both ends of their only connection"
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=30))
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
    store.set("key", "value")
    assert store.get("key") == b"value"
