"""Named points of a job at which tests inject faults. Nothing listens unless ``craft.testing`` was armed.

On the main thread, in this order: join, entering, claimed, started, batch, flushed (each bucket of the last microbatch,
during its backward), blocks_sent, result_part (sent to one peer, perhaps not yet to the next), result_sent (these three
for each bucket; on the exchange thread for those exchanged during backward), before_acknowledge, acknowledging,
committed. In a step that gathers, before its second pass: gathering (lengths are exchanged). On the opening thread: opening,
opened. With ``job.attempts()`` each reduction reaches those from blocks_sent to acknowledging, then reduced.

When a worker joins: staged (a donor has copied its stripe); on the joiner fetched (on a separate thread: the state has arrived),
loaded, replayed (a result that was queued meanwhile). In a collective call between the steps: calling (lengths are
exchanged), called (all parts have arrived), scored (a batch of an evaluation). With checkpoints: saved (this worker's share
is copied, about to be written), verified (the checkpoint that all restore is verified on every worker).

System calls that a test makes fail (``Fault(kind="error")``), each reached just before the call, on any thread:
store.accept, donor.accept, opener.accept.
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
    """Announce that this worker is at ``point`` of ``step``; give ``rank`` if it is not that of the current generation.

    For a system call, the listener may raise the OSError with which it is to fail.
    """
    if _listener is not None:
        _listener(point, step, rank)
