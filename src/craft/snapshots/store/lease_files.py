"""Leases on a store without locks: announce that this process writes there, or collects garbage.

A lease is a file that its owner rewrites every few seconds. Each side writes first and looks for the other afterwards, so that
at least one sees the other. All times are by the store's clock. ``remote.py`` owns them.
docs/explanation/decisions/checkpoint_store.md says why this is enough, and what it leaves open.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from craft.protocol.errors import SnapshotError
from craft.snapshots.store.store import Guard, Store, StoreBusy

INTENTS = "intents"
"""Leases of writers."""
LEASES = "leases"
"""Leases of collectors."""
TTL_S = {INTENTS: 120.0, LEASES: 30.0}
"""An owner that has not renewed for this long is gone. Writers wait for a dead collector, so that its time is shorter."""


class LeaseFile(Guard):
    """One lease, renewed on a thread until ``end``."""

    def __init__(self, store: Store, modified: Callable[[str], float | None], folder: str, who: str) -> None:
        """``modified`` returns when a file of the store was written, by its clock; None if it is missing."""
        self._store = store
        self._modified = modified
        self._ttl_s = TTL_S[folder]
        self.path = f"{folder}/{who}-{os.urandom(6).hex()}"
        # Guards what follows: the thread renews, and so does check().
        self._lock = threading.Lock()
        self.spoken = 0.0
        """When this lease was last renewed, by the store's clock."""
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
            # After a long sleep, as of a virtual machine, others may have taken this owner for gone.
            self._lost |= heard is None or (self.spoken > 0.0 and heard - self.spoken >= self._ttl_s)
            self.spoken = heard or self.spoken

    def check(self) -> None:
        self.speak()
        if self._lost:
            raise StoreBusy(f"{self._store.url}: the store was unreachable for too long; try again")

    def others(self, folder: str) -> list[str]:
        """Return the other leases in ``folder`` that have not expired."""
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
        # If this fails, it expires.
        with contextlib.suppress(SnapshotError):
            self._store.remove([self.path])

    def _renew(self) -> None:
        while not self._ended.wait(self._ttl_s / 10):
            # The next check notices.
            with contextlib.suppress(SnapshotError):
                self.speak()
