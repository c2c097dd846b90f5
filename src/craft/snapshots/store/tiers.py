"""The stores of a job: a durable one, and perhaps a fast one on each host that is written first.

With several hosts, the fast store of each holds only what the workers of that host wrote: nothing is listed there, and a
reader takes from it what it has.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from craft.snapshots.store.local import LocalStore
from craft.snapshots.store.remote import RemoteStore
from craft.snapshots.store.store import Store


class Tiers(NamedTuple):
    """The stores of a job."""

    local: LocalStore | None
    durable: Store
    owner: str = ""
    """The id of the job that must own the durable store; empty: not checked."""

    @property
    def url(self) -> str:
        """The URL of the durable store, for people."""
        return self.durable.url

    @property
    def nearest_first(self) -> tuple[Store, ...]:
        return (self.durable,) if self.local is None else (self.local, self.durable)


def open_store(url: str) -> Store:
    """Return the store at a path, or at a URL that fsspec knows. Nothing is read or written yet."""
    scheme, found, rest = url.partition("://")
    if not found or scheme in ("file", "local"):
        return LocalStore(rest if found else os.path.expanduser(url))
    return RemoteStore(url)


def open_tiers(url: str, local: str | None = None, owner: str = "") -> Tiers:
    """Return the stores at a URL and, if given, in a directory of this host."""
    return Tiers(LocalStore(local) if local else None, open_store(url), owner)
