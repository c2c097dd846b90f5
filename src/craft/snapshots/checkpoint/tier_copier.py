"""Copy a worker's share of checkpoints from the fast store of its host to the durable one.

In: parts that ``writer.py`` has written to the fast store. Out: the same in the durable store, and events. The writer owns
one; it has its own thread.

If the durable store is slower than the checkpoints come, some are skipped. All members must skip the same ones, or none would
be complete there: the member with share 0 chooses, always the newest, and marks it in the durable store; the others follow
the mark. It chooses the next one when that is complete. Checkpoints with a tag are never skipped, and need no mark.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from craft.protocol.errors import SnapshotError
from craft.snapshots.checkpoint.catalog import fetch_chunk
from craft.snapshots.checkpoint.gc import apply_keep
from craft.snapshots.checkpoint.publish import CheckpointEvents, in_parallel, write_share
from craft.snapshots.store.background import lower_priority, retry_after
from craft.snapshots.store.local import LocalStore, Pin
from craft.snapshots.store.manifest import PARTS, Part, Ref, manifest_path
from craft.snapshots.store.store import Adding, Store

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_LAGGARD_S = 120.0
"""How long member 0 waits for the others to finish what it has finished."""
_MAX_PENDING = 8
_CLOSE_S = 10.0


class TierCopier:
    """``keep`` is the number of checkpoints without a tag that stay in the durable store."""

    def __init__(
        self, local: LocalStore, durable: Store, worker_id: str, keep: int, notes: CheckpointEvents, owner: str = ""
    ) -> None:
        """``owner``: the id of the job that must own the durable store."""
        self._local = local
        self._durable = durable
        self._owner = owner
        self._worker_id = worker_id
        self._keep = keep
        self._notes = notes
        # Guards what follows: the writer's thread offers, the copier's thread copies.
        self._change = threading.Condition()
        self._pending: dict[str, tuple[Part, Pin]] = {}
        """By name, the oldest first."""
        self._closed = False
        self._awaited = False
        """Whether the job waits for the copies."""
        self._thread = threading.Thread(target=self._run, name="craft-copier", daemon=True)
        self._thread.start()

    # On the writer's threads.

    def offer(self, part: Part, pin: Pin) -> None:
        """Queue a share in the fast store. Its chunks stay there until the copier releases ``pin``."""
        with self._change:
            self._pending[part.name] = (part, pin)
            self._awaited = False
            waiting = [each for each, _ in self._pending.values() if each.tag is None]
            # No member will choose those of an earlier membership.
            gone = [each.name for each in waiting if each.generation != part.generation]
            gone += [each.name for each in waiting[:-_MAX_PENDING]]
            for name in gone:
                self._forget(name)
            self._change.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything that was offered is copied or skipped; return whether it is."""
        with self._change:
            self._awaited = True
            return self._change.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(_CLOSE_S)
        with self._change:
            for name in [*self._pending]:
                self._forget(name)

    def _forget(self, name: str) -> None:
        found = self._pending.pop(name, None)
        if found is not None:
            found[1].release()

    # On the copier's thread.

    def _run(self) -> None:
        lower_priority()
        tries = 0
        while True:
            with self._change:
                self._change.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
            # Chosen anew before each attempt: there may be a newer one.
            part = self._choose()
            if part is None:
                pause_s: float | None = _LOOK_S
            else:
                tries, pause_s = self._attempt(part, tries)
            if pause_s is not None and self._ended(pause_s):
                return

    def _attempt(self, part: Part, tries: int) -> tuple[int, float | None]:
        """Copy a share; return the number of failed attempts, and the pause before the next."""
        try:
            self._copy(part)
        except Exception as error:  # noqa: BLE001  (the edge of a thread: it becomes an event)
            tries += 1
            pause_s = retry_after(tries, error, self._awaited)
            self._notes.failed(part.name, part.step, error, tries, pause_s)
            if pause_s is not None:
                return tries, pause_s
            self._done(part)
            return 0, None
        self._done(part)
        if part.part == 0 and part.of > 1 and part.tag is None:
            self._await_others(part)
        return 0, None

    def _choose(self) -> Part | None:
        """Return what to copy next; None: not known yet."""
        with self._change:
            waiting = [part for part, _ in self._pending.values()]
        tagged = [part for part in waiting if part.tag is not None]
        if tagged or not waiting or waiting[-1].part == 0:
            return tagged[0] if tagged else waiting[-1] if waiting else None
        try:
            begun = {found.path for found in self._durable.files(PARTS)}
        except SnapshotError as error:
            logger.info("cannot read which checkpoint is to be copied: %s", error)
            return None
        return next((part for part in reversed(waiting) if _mark(part) in begun), None)

    def _copy(self, part: Part) -> None:
        _, manifest = write_share(self._durable, self._worker_id, lambda adding: self._add(adding, part), self._owner)
        if manifest is not None:
            self._notes.written(manifest, self._durable.url, time.time() - manifest.time)
            apply_keep(self._durable, self._keep)

    def _add(self, adding: Adding, part: Part) -> Part:
        if part.part == 0:
            self._durable.put(_mark(part), b"{}")
        new: list[int] = []

        def add(ref: Ref) -> None:
            if adding.add(ref, lambda: self._read(ref, part.name)):
                new.append(ref.size)

        refs = [Ref(chunk.hash, chunk.size) for chunk in part.chunks]
        in_parallel(self._durable, add, [*refs, part.header] if part.writes_header else refs)
        return msgspec.structs.replace(part, new_bytes=sum(new))

    def _read(self, ref: Ref, name: str) -> memoryview:
        out = memoryview(bytearray(ref.size))
        fetch_chunk((self._local,), ref, out, f"a share of checkpoint {name}")
        return out

    def _done(self, part: Part) -> None:
        """It is copied or given up: skip older ones without a tag."""
        with self._change:
            self._forget(part.name)
            if part.tag is None:
                for name in [name for name, (each, _) in self._pending.items() if not each.tag and name < part.name]:
                    self._forget(name)
            self._change.notify_all()

    def _await_others(self, part: Part) -> None:
        give_up = time.monotonic() + _LAGGARD_S
        while time.monotonic() < give_up and not self._is_listed(part) and not self._parted(part):
            if self._ended(_LOOK_S):
                return

    def _is_listed(self, part: Part) -> bool:
        try:
            self._durable.get(manifest_path(part.name))
        except SnapshotError:
            # Not there yet; or the store does not answer for now.
            return False
        return True

    def _parted(self, part: Part) -> bool:
        with self._change:
            return any(each.generation != part.generation for each, _ in self._pending.values())

    def _ended(self, seconds: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: self._closed, seconds)


def _mark(part: Part) -> str:
    """Return the file that marks this one as chosen."""
    return f"{PARTS}/{part.name}/begun"
