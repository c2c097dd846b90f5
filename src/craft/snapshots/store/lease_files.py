"""Claims on a store in which nobody can hold a lock: that somebody writes there, or collects garbage.

A claim is a file that its owner writes anew every few seconds. Each side speaks first and looks for the other afterwards, so at
least one sees the other. All times are the store's own. ``remote.py`` owns them; ``docs/decisions/checkpoint_store.md`` says
why this is enough, and what it leaves open.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from craft.protocol.errors import SnapshotError
from craft.snapshots.store.store import Collecting, Store, StoreBusy, Writing

INTENTS = "intents"
"""Claims of those who write."""
LEASES = "leases"
"""Claims of those who collect garbage."""
TTL_S = {INTENTS: 120.0, LEASES: 30.0}
"""Whoever has not spoken for this long is gone. While a dead collector is waited for nobody can write, so that is shorter."""


class LeaseFile(Writing, Collecting):
    """One claim, renewed on a thread of its own until ``end``."""

    def __init__(self, store: Store, modified: Callable[[str], float | None], folder: str, who: str) -> None:
        """``modified`` returns when a file of the store was written, by its clock; None if it is missing."""
        self._store = store
        self._modified = modified
        self._ttl_s = TTL_S[folder]
        self.path = f"{folder}/{who}-{os.urandom(6).hex()}"
        # Guards what follows: the thread speaks, and so does whoever checks.
        self._lock = threading.Lock()
        self.spoken = 0.0
        """When this claim was last heard of, by the store's clock."""
        self._lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="craft-claim", daemon=True)

    def begin(self) -> None:
        self.speak()
        self._thread.start()

    def speak(self) -> None:
        with self._lock:
            self._store.put(self.path, b"{}")
            heard = self._modified(self.path)
            # Slept for too long, as a virtual machine may: others may have taken us for gone.
            self._lost |= heard is None or (self.spoken > 0.0 and heard - self.spoken >= self._ttl_s)
            self.spoken = heard or self.spoken

    def check(self) -> None:
        self.speak()
        if self._lost:
            raise StoreBusy(f"{self._store.url}: the store was out of reach for too long; try again")

    def others(self, folder: str) -> list[str]:
        """Claims in ``folder`` whose owners live, but for this one."""
        found = self._store.files(folder)
        return [each.path for each in found if each.modified + TTL_S[folder] > self.spoken and each.path != self.path]

    def tidy(self) -> None:
        for folder in (INTENTS, LEASES):
            live = self.others(folder)
            gone = [each.path for each in self._store.files(folder) if each.path not in live and each.path != self.path]
            self._store.remove(gone)

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        # It runs out by itself where this fails.
        with contextlib.suppress(SnapshotError):
            self._store.remove([self.path])

    def _renew(self) -> None:
        while not self._ended.wait(self._ttl_s / 10):
            # The next check finds out.
            with contextlib.suppress(SnapshotError):
                self.speak()
