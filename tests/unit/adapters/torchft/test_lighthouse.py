"""The door to torchft's lighthouse: torchft's own client and lighthouse at its two sides, and heartbeats that never expire."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchft.coordination import LighthouseClient, LighthouseServer

from craft.adapters.torchft import messages
from craft.adapters.torchft.lighthouse import LighthouseProxy, serve
from craft.adapters.torchft.messages import Attends, Gone
from craft.protocol.errors import MalformedMessage

LIMIT = timedelta(seconds=30)


def start() -> Any:
    return LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=600_000
    )


def connect(address: str) -> Any:
    return grpc.aio.insecure_channel(f"127.0.0.1:{address.rpartition(':')[2]}")


class Job:
    """Replicas of torchft's at a door, each on a thread of its own."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._attend = channel.unary_unary(messages.ATTEND)
        self._gone = channel.unary_unary(messages.GONE)
        self._threads = ThreadPoolExecutor(8)

    def joins(self, replica_id: str) -> None:
        LighthouseClient(self._address, LIMIT).heartbeat(replica_id)
        self._attend(msgspec.json.encode(Attends(worker_id=f"worker of {replica_id}", replica_id=replica_id)))

    def ask(self, replica_id: str) -> Future[Any]:
        client = LighthouseClient(self._address, LIMIT)
        return self._threads.submit(client.quorum, replica_id, LIMIT)

    def lose(self, replica_id: str, *, by: str, generation: int = 2) -> None:
        said = Gone(worker_id=f"worker of {by}", generation=generation, worker_ids=(f"worker of {replica_id}",))
        self._gone(msgspec.json.encode(said))


@contextlib.contextmanager
def running() -> Iterator[Job]:
    """A proxy with lighthouses of torchft behind it, all on threads of this process."""
    loop = asyncio.new_event_loop()

    async def open_proxy() -> tuple[LighthouseProxy, Any, int]:
        proxy = LighthouseProxy(start, connect)
        await proxy.open()
        return proxy, *await serve(proxy, "127.0.0.1:0")

    async def close_proxy() -> None:
        # Else torchft's threads go on to log, between the tests that follow.
        await server.stop(None)
        await proxy.close()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy, server, port = asyncio.run_coroutine_threadsafe(open_proxy(), loop).result(30)
    try:
        yield Job(port)
    finally:
        asyncio.run_coroutine_threadsafe(close_proxy(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def with_job(test: Callable[[Job], None]) -> Callable[[], None]:
    """Open and close the proxy inside the test: pytest does not capture what torchft prints before and after it."""

    def run() -> None:
        with running() as job:
            test(job)

    return run


def members(asked: Future[Any]) -> tuple[int, list[str]]:
    quorum = asked.result(30)
    return quorum.quorum_id, [each.replica_id for each in quorum.participants]


@with_job
def test_those_who_are_left_get_their_quorum_at_once_when_somebody_is_gone(job: Job) -> None:
    for each in ("a", "b", "c"):
        job.joins(each)
    first = [job.ask(each) for each in ("a", "b", "c")]
    assert [members(each) for each in first] == [(1, ["a", "b", "c"])] * 3
    waiting = [job.ask("a"), job.ask("b")]
    assert not any(each.done() for each in waiting), "c is taken for alive"
    job.lose("c", by="a")
    assert not any(each.done() for each in waiting), "b has not aborted its group yet"
    job.lose("c", by="b")
    assert [members(each) for each in waiting] == [(2, ["a", "b"])] * 2, "and its number is a new one"
    with pytest.raises(RuntimeError, match="goes on without"):
        job.ask("c").result(30)
    # As it goes on: a quorum of the same members is the same quorum.
    again = [job.ask("a"), job.ask("b")]
    assert [members(each) for each in again] == [(2, ["a", "b"])] * 2


@with_job
def test_one_that_is_just_starting_is_not_waited_for(job: Job) -> None:
    for each in ("a", "b"):
        job.joins(each)
    assert {members(each)[0] for each in [job.ask("a"), job.ask("b")]} == {1}
    waiting = job.ask("a")
    job.lose("b", by="a")
    assert members(waiting) == (2, ["a"])
    job.joins("d")
    assert members(job.ask("a")) == (2, ["a"]), "its heart beats, but it has asked for nothing yet"
    newcomer, found = job.ask("d"), (2, ["a"])
    while "d" not in found[1]:
        # Its question may come after the next one of the others.
        found = members(job.ask("a"))
    assert members(newcomer) == found == (3, ["a", "d"])


@with_job
def test_who_asks_while_others_are_waited_for_is_not_sent_to_the_lighthouse_before(job: Job) -> None:
    """Its question waits for its own abort, and the one whom it was meant for is closed meanwhile."""
    for each in ("a", "b", "c", "d"):
        job.joins(each)
    assert {members(each)[0] for each in [job.ask(each) for each in "abcd"]} == {1}
    job.lose("d", by="a")
    waiting = [job.ask("a"), job.ask("b")]
    job.lose("c", by="a", generation=3)
    job.lose("c", by="b", generation=3)
    assert [members(each)[1] for each in waiting] == [["a", "b"]] * 2


@settings(deadline=None, database=None, derandomize=True)
@given(st.integers(min_value=0, max_value=2**62), st.lists(st.text(min_size=1), max_size=4))
def test_only_the_number_of_a_quorum_is_changed(number: int, replica_ids: list[str]) -> None:
    inner = b"\x08\x07" + b"".join(
        messages._field(2, messages.heartbeat_of(each) + b"\x20\x05") for each in replica_ids
    )
    response = messages.renumbered(messages._field(1, inner), number)
    assert messages.quorum_in(response) == messages.Quorum(number=number, replica_ids=tuple(replica_ids))
    assert messages.renumbered(response, 7) == messages._field(1, inner)


@settings(deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=64))
def test_rubbish_is_refused_or_read_but_never_more(data: bytes) -> None:
    for read in (messages.asking, messages.beating, messages.quorum_in):
        try:
            read(data)
        except MalformedMessage:
            continue
