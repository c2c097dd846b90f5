"""A replica for tests: over one Gloo group, live until it is told to break."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from craft.groups.group import P2P
from craft.groups.sharded.install import install
from craft.groups.sharded.operation import TAGS, Operation
from craft.groups.subgroup import Subgroup


class OneGroup:
    """Runs operations over one group; after ``break_after`` of them, it echoes."""

    def __init__(self, group: P2P) -> None:
        self.position = group.rank
        self.size = group.size
        self.names: list[str] = []
        """What ran, in its order."""
        self.break_after: int | None = None
        self.raise_after: int | None = None
        self._group = group

    def run(self, group: str, ranks: Sequence[int], operation: Operation) -> None:
        self.names.append(operation.name)
        if self.raise_after is not None and len(self.names) > self.raise_after:
            raise InterruptedError("the script raised")
        if self.break_after is not None and len(self.names) > self.break_after:
            operation.echo()
        else:
            operation.live(Subgroup(self._group, ranks, TAGS * (1 + zlib.crc32(group.encode()) % (1 << 20))))

    def mend(self) -> None:
        self.names.clear()
        self.break_after = self.raise_after = None


installed: OneGroup | None = None
"""The replica of this process."""


def replica_of(group: P2P) -> OneGroup:
    """Return this process's replica; the first call makes it torch's world."""
    global installed
    if installed is None:
        installed = OneGroup(group)
        install(installed)
    installed.mend()
    return installed
