"""Named points of a job at which tests place a fault. Nothing listens unless ``craft.testing`` was armed.

On the main thread, in this order: join, entering, claimed, started, batch, flushed (each bucket of the last microbatch,
during its backward), blocks_sent, result_part (sent to one peer, perhaps not yet to the next), result_sent (these three
for each bucket; on the exchange thread for those exchanged during backward), before_acknowledge, acknowledging,
committed. In a step that gathers, before its second pass: gathering (lengths are exchanged). On the opening thread: opening,
opened. In a loop of the script's own each reduction reaches those from blocks_sent to acknowledging, then reduced.

When somebody joins: staged (a donor's stripe is copied); of the joiner fetched (on a thread of its own: the state is here),
loaded, replayed (a result that was queued meanwhile). In a collective call between the steps: calling (lengths are
exchanged), called (everybody's part is here), scored (a batch of an evaluation). With checkpoints: saved (this worker's share
is copied, and about to be written), verified (the one that all begin from, or go back to, is in hand here and everywhere).

System calls that a test makes fail (``Fault(kind="error")``), each reached just before the call, on any thread:
store.accept, donor.accept.
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, int | None], None]

_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Call ``listener(point, step, rank)`` whenever a point is reached; None ends that."""
    global _listener
    _listener = listener


def reach(point: str, step: int = 0, rank: int | None = None) -> None:
    """Say that this worker is at ``point`` of ``step``; ``rank`` where it is not that of the generation it acts under.

    Where the point is a system call, the listener may raise the OSError with which that is to fail.
    """
    if _listener is not None:
        _listener(point, step, rank)
