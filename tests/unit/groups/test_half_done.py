"""Messages of which a part has arrived when the connection ends: Gloo itself would never let go of who waits for them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from .cast import AT_ONCE_S, LIMIT_S, Actor, Cast, open_group

BYTES = 1 << 26


def queued_bytes(pid: int) -> int:
    """What the largest queue of a connection of this process holds that it has not read."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return max((int(row[4].partition(":")[2], 16) for row in rows if row[9] in own), default=0)


def wait_for_queue(receiver: Actor, size: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while queued_bytes(receiver.pid) < size:
        assert time.monotonic() < deadline, "nothing is on its way"
        time.sleep(0.01)


def test_abort_frees_who_sends_to_a_peer_that_stopped_half_way_P5(cast: Cast) -> None:
    sender, receiver = cast.actors(2)
    assert [outcome.error for outcome in open_group(1, [sender, receiver])] == ["", ""]
    receiver.ask("post", 1, BYTES, 0)
    receiver.stop()

    sender.ask("begin", "half", "send_much", 1, BYTES, 1)
    wait_for_queue(receiver, 1 << 16)
    assert sender.ask("abort", 1).took_s < AT_ONCE_S

    assert sender.ask("end", "half", AT_ONCE_S).error == "GroupAborted"


def test_a_connection_that_ends_half_way_is_broken_without_an_abort_P5(cast: Cast) -> None:
    """Both members live: nobody would see a death, and nobody would abort."""
    receiver, sender = cast.actors(2)
    assert [outcome.error for outcome in open_group(1, [receiver, sender])] == ["", ""]
    receiver.ask("post", 1, BYTES, 1)
    receiver.ask("begin", "half", "finish")
    receiver.stop()
    sender.ask("begin", "half", "send_much", 1, BYTES, 0)
    wait_for_queue(receiver, 1 << 16)
    assert sender.ask("abort", 1).took_s < AT_ONCE_S
    receiver._signal(signal.SIGCONT)

    assert receiver.ask("end", "half", LIMIT_S).error == "GroupBroken"
    assert receiver.ask("finish").error == "GroupBroken"


def test_abort_frees_who_receives_from_a_peer_that_died_half_way_P5(cast: Cast) -> None:
    receiver, sender = cast.actors(2)
    assert [outcome.error for outcome in open_group(1, [receiver, sender])] == ["", ""]
    receiver.ask("post", 1, BYTES, 1)
    receiver.ask("begin", "half", "finish")
    # It reads nothing for a while, so that most of the message is still to be sent when the sender dies.
    receiver.stop()
    sender.ask("begin", "half", "send_much", 1, BYTES, 0)
    wait_for_queue(receiver, 1 << 16)
    sender.kill()
    receiver._signal(signal.SIGCONT)

    assert receiver.ask("abort", 1).took_s < AT_ONCE_S

    assert receiver.ask("end", "half", AT_ONCE_S).error in ("GroupAborted", "GroupBroken")
