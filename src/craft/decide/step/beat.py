"""The beat: all positions of a replica take the same safe points.

Position 0 collects one small message from every position, itself included, and sends all the same answer. There is a beat
before each microbatch, before the exchange (as if it were another microbatch), and before the commit. The last is needed as
much as the others: a worker that has every acknowledgement and runs the update waits there for the others of its replica,
which may have been called into a new generation before they had theirs.

Where a beat breaks, because a worker of the replica is gone, those that are left regroup without an answer: what no beat
confirmed is discarded (``regroup.enter``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class BeatMessage(msgspec.Struct, frozen=True, array_like=True):
    """What one position tells position 0."""

    whole: bool = True
    """Whether its last microbatch and its last update ran whole: no collective of theirs broke or was answered by an echo."""
    data: bool = True
    """Whether it has data for the next microbatch."""
    waits: bool = False
    """Whether a newer generation waits for it, or its exchange broke."""
    may_commit: bool = False
    """Before a commit: whether it has the acknowledgements of all members of all replicas."""


class BeatAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What position 0 tells every position."""

    go: bool
    """Go on with the microbatch, the exchange or the update; else regroup: enter the generation that waits."""
    confirms: bool
    """Whether every position ran its last microbatch and update whole: leaves can be merged, and the state is clean."""
    without_data: tuple[int, ...] = ()
    """Positions that have no data for the next microbatch."""


def before_microbatch(messages: Sequence[BeatMessage]) -> BeatAnswer:
    """Answer the beat before a microbatch or the exchange; ``messages`` are in the order of positions."""
    whole = all(message.whole for message in messages)
    return BeatAnswer(
        go=whole and not any(message.waits for message in messages),
        confirms=whole,
        without_data=tuple(position for position, message in enumerate(messages) if not message.data),
    )


def before_commit(messages: Sequence[BeatMessage]) -> BeatAnswer:
    """Answer the beat before the commit: all positions commit, or none does.

    One position that has every acknowledgement is enough: then every member has the result.
    """
    return BeatAnswer(
        go=any(message.may_commit for message in messages), confirms=all(message.whole for message in messages)
    )
