"""The beat: all positions of a replica take the same safe points.

Position 0 collects one small message from every position, itself included, and sends all the same answer. There is a beat
before each microbatch, before the exchange (as if it were another microbatch), and after every attempt at the exchange, before
the commit. The last is needed as much as the others: a worker that has every acknowledgement commits and begins its update,
where it waits for the others of its replica, which may have been called into a new generation before they had theirs. A beat is
also the first thing that positions do together in a generation that they entered, wherever in the step each of them was.

Where a beat breaks, because a worker of the replica is gone, those that are left regroup without an answer: a leaf that no beat
confirmed is discarded (``regroup.enter``), and no position commits. An update needs no beat: none of its numbers are echoes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class BeatMessage(msgspec.Struct, frozen=True, array_like=True):
    """What one position tells position 0."""

    whole: bool = True
    """Whether its last microbatch ran whole: no collective broke or was answered by an echo. Before a commit: its exchange."""
    data: bool = True
    """Whether it has data for the next microbatch."""
    waits: bool = False
    """Before a microbatch or the exchange: whether a newer generation waits for it."""
    may_commit: bool = False
    """Before a commit: whether it has the acknowledgements of all members of all replicas."""
    extra: int = 0
    """Before a microbatch: what it would compute only for comparison, a number below 0; 0: nothing."""


class BeatAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What position 0 tells every position."""

    go: bool
    """Go on with the microbatch or the exchange, or commit."""
    confirms: bool
    """Whether all positions were whole: their leaves can be merged. Before a commit: all have the same combined word."""
    without_data: tuple[int, ...] = ()
    """Positions that have no data for the next microbatch."""
    extra: int = 0
    """What all compute next, only for comparison; 0: the next microbatch of their share."""


def before_microbatch(messages: Sequence[BeatMessage]) -> BeatAnswer:
    """Answer the beat before a microbatch or the exchange; ``messages`` are in the order of positions.

    Without "go" all enter the generation that waits, or that follows the break. What is computed for comparison is position 0's
    choice alone: the others may know less (one that joined), and their share is the same.
    """
    whole = all(message.whole for message in messages)
    go = whole and not any(message.waits for message in messages)
    return BeatAnswer(
        go=go,
        confirms=whole,
        without_data=tuple(position for position, message in enumerate(messages) if not message.data),
        extra=messages[0].extra if go else 0,
    )


def before_commit(messages: Sequence[BeatMessage]) -> BeatAnswer:
    """Answer the beat after an attempt at the exchange: all positions commit, or none does.

    One position that has every acknowledgement is enough to commit: then every member has the result. Else, where the exchange
    of one broke, all regroup (``confirms`` is False). Else all have the same combined word, and do what it says: send again,
    or find out who differs.
    """
    return BeatAnswer(
        go=any(message.may_commit for message in messages), confirms=all(message.whole for message in messages)
    )
