"""A process that is forked while a store is locked, as a data loader is, must not keep it locked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from craft.snapshots.store.store import Store
from craft.snapshots.store.tiers import open_store


@pytest.mark.parametrize("hold", [lambda store: store.writing("w0"), lambda store: store.collecting("w0")])
def test_who_was_forked_meanwhile_locks_nothing(
    tmp_path: Path, hold: Callable[[Store], AbstractContextManager[object]]
) -> None:
    store = open_store(str(tmp_path / "store"))
    with store.writing("w0"):
        pass
    with hold(store):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with store.collecting("w1"):
            pass
        with store.writing("w1"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
