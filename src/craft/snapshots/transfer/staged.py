"""A staged stripe: the bytes that a donor has copied, and the hash of each frame, computed on threads."""

from __future__ import annotations

import threading

import torch

from craft.snapshots.state.device_copy import Copied, at_once
from craft.snapshots.state.raw_memory import view_of
from craft.snapshots.store.background import num_hashing
from craft.snapshots.transfer import protocol
from craft.wire import peers


class Staged:
    """What is served. Never changed: a peer that is being served when the next one is staged gets it complete."""

    def __init__(
        self,
        name: str,
        level: int,
        part: int,
        of: int,
        header: bytes,
        stripe: torch.Tensor,
        copied: Copied = at_once,
        *,
        large: bool = False,
    ) -> None:
        """``copied`` returns once the bytes are there; ``large``: send them in large frames."""
        self.name = name
        self.level = level
        self.part = part
        self.of = of
        self.header = header
        self.view = view_of(stripe)
        self.frame_bytes = protocol.LARGE_FRAME_BYTES if large else peers.FRAME_BYTES
        self.num_served = 0
        """Connections that are being served from it; counted by the donor."""
        # Guards the digests, which threads compute once each, while the first frames are already being sent.
        self._more = threading.Condition()
        self._digests: dict[int, bytes] = {}
        self._next = 0
        self._ended = False
        self._copied = copied
        self._threads = [
            threading.Thread(target=self._hash, name="craft-donor-hash", daemon=True) for _ in range(num_hashing())
        ]
        for thread in self._threads:
            thread.start()

    def _hash(self) -> None:
        while (begin := self._take()) < len(self.view):
            # A frame is sent only once it has its hash.
            self._copied(begin + self.frame_bytes)
            digest = peers.digest_of(self.frame(begin))
            with self._more:
                if self._ended:
                    return
                self._digests[begin] = digest
                self._more.notify_all()

    def _take(self) -> int:
        """Return where the next frame begins that is not hashed yet."""
        with self._more:
            begin, self._next = self._next, self._next + self.frame_bytes
            return begin

    def frame(self, begin: int) -> memoryview:
        return self.view[begin : begin + self.frame_bytes]

    def digest(self, begin: int) -> bytes:
        """Return the hash of the frame that begins there; wait for it."""
        with self._more:
            self._more.wait_for(lambda: begin in self._digests or self._ended)
            if self._ended:
                raise EOFError("the donor is closed")
            return self._digests[begin]

    def end(self) -> None:
        """Stop serving."""
        with self._more:
            self._ended = True
            self._more.notify_all()
        for thread in self._threads:
            thread.join()
