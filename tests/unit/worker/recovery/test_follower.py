"""The thread that takes part for a joiner: what the main thread gets from it, and when it takes over."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from craft.protocol.errors import ConfigError, SnapshotAborted, SnapshotError
from craft.protocol.membership import Generation, Member, Settlement
from craft.protocol.messages import Directive
from craft.snapshots.state.serialized import State
from craft.snapshots.transfer.fetch import Fetched
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.participant import Participant
from craft.worker.recovery.follower import Follower
from craft.worker.reduce.buckets import BucketLayout

from ..blocks import no_buffers
from ..crew import wait_for
from ..members import LIMIT_S

JOINS = Settlement(step=7, commits=(), owners=(), given=(), idle=("w0",), joiners=("w0",), over=True)


class Joiner:
    """A worker without the state in a generation whose loop is over: there are no steps to take part in."""

    def __init__(self, fetch: Callable[[threading.Event], Fetched]) -> None:
        self.membership = MembershipClient("w0", "127.0.0.1", b"", lambda *_: None)
        self.direct(1)
        self.participant = Participant("w0", self.membership, "redo", lambda _: None, None)
        self.participant.regroup(lambda _: 0)
        ledger = self.participant.ledger
        self.participant._ledger = replace(ledger, has_state=False, idle=frozenset({"w0"}), over=True, step=7)
        self.settled: list[Settlement] = []
        self.broken: list[Exception] = []
        self.follower = Follower(
            self.participant,
            lambda _: BucketLayout([], 1),
            no_buffers,
            lambda _: 0,
            lambda _generation, _donors, cancelled: fetch(cancelled),
            self.settled.append,
            self.broken.append,
        )

    def direct(self, number: int) -> None:
        generation = Generation(number=number, nonce="", members=(Member(worker_id="w0"),))
        self.membership.direct(Directive(sequence=number, generation=generation))


def state(_: threading.Event | None = None) -> Fetched:
    found = State({"net": torch.nn.Linear(2, 1)}, {}, b"")
    return Fetched(7, found.header, list(found.tensors))


def test_the_main_thread_gets_the_state_and_takes_over_when_nothing_is_queued() -> None:
    joiner = Joiner(state)
    assert joiner.follower.runs
    joiner.follower.start(JOINS)
    assert joiner.follower.wait_state().level == 7
    assert joiner.follower.next() is None
    assert joiner.follower.level and not joiner.follower.runs and not joiner.follower.has_results
    assert joiner.settled == [JOINS], "the settlement that it joins by is reported"
    assert joiner.participant.ledger.has_state, "with the state it counts as a copy"


def test_an_error_of_the_fetching_thread_is_raised_on_the_main_thread() -> None:
    def fails(_: threading.Event) -> Fetched:
        raise ConfigError("no room for the state")

    joiner = Joiner(fails)
    joiner.follower.start(JOINS)
    with pytest.raises(ConfigError, match="no room for the state"):
        joiner.follower.wait_state()


def test_a_donor_that_does_not_answer_breaks_the_group_and_the_next_generation_fetches_again() -> None:
    tries: list[threading.Event] = []

    def fails_once(cancelled: threading.Event) -> Fetched:
        tries.append(cancelled)
        if len(tries) == 1:
            raise SnapshotError("the donor is gone")
        return state()

    joiner = Joiner(fails_once)
    joiner.follower.start(JOINS)
    wait_for(lambda: bool(joiner.broken), "the loss of the donor is reported")
    assert "the donor is gone" in str(joiner.broken[0])
    # Alone in it, and without the state: the job has to begin anew, which the main thread learns.
    joiner.direct(2)
    with pytest.raises(BaseException, match="state"):
        joiner.follower.wait_state()
    assert tries[0].is_set(), "what comes from the old donors now is of no use"


def test_an_aborted_fetch_is_no_fault() -> None:
    aborted = threading.Event()

    def aborts(_: threading.Event) -> Fetched:
        aborted.set()
        raise SnapshotAborted("a newer generation")

    joiner = Joiner(aborts)
    joiner.follower.start(JOINS)
    assert aborted.wait(LIMIT_S)
    assert joiner.follower.runs and not joiner.broken
    joiner.membership.close()
