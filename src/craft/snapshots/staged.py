"""A staged stripe.

Enters: the bytes that a donor has copied. Leaves: the same bytes and the hash of each frame of them, which a thread of its own
makes. ``donor.py`` owns them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from craft.snapshots import line
from craft.snapshots.memory import view_of


class Staged:
    """What is served. Never changed, so that who is in the middle of it when the next one comes gets it whole."""

    def __init__(
        self,
        name: str,
        level: int,
        part: int,
        of: int,
        header: bytes,
        stripe: torch.Tensor,
        copied: Callable[[], None] = lambda: None,
    ) -> None:
        """``copied`` returns once the bytes are there."""
        self.name = name
        self.level = level
        self.part = part
        self.of = of
        self.header = header
        self.view = view_of(stripe)
        # Guards the digests, which a thread of its own makes: once, while the first of them are already being sent.
        self._more = threading.Condition()
        self._digests: list[bytes] = []
        self._ended = False
        self._copied = copied
        self.thread = threading.Thread(target=self._hash, name="craft-donor-hash", daemon=True)
        self.thread.start()

    def _hash(self) -> None:
        # Nobody is sent a frame before it has its hash.
        self._copied()
        for begin in range(0, len(self.view), line.FRAME_BYTES):
            digest = line.digest_of(self.view[begin : begin + line.FRAME_BYTES])
            with self._more:
                if self._ended:
                    return
                self._digests.append(digest)
                self._more.notify_all()

    def digest(self, number: int) -> bytes:
        """The hash of a frame; waits for it."""
        with self._more:
            self._more.wait_for(lambda: len(self._digests) > number or self._ended)
            if self._ended:
                raise EOFError("the donor is closed")
            return self._digests[number]

    def end(self) -> None:
        """Nobody is served any more."""
        with self._more:
            self._ended = True
            self._more.notify_all()
        self.thread.join()
